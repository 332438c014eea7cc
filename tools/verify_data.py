"""Check every byte of a folder of prepared tokens: see `python tools/verify_data.py --help`."""

import door

if __name__ == "__main__":
    door.enter("data", "verify")
