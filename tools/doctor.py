"""What is installed, and which kernels will run: see `python tools/doctor.py --help`."""

import door

if __name__ == "__main__":
    door.enter("doctor")
