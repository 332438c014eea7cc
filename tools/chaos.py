"""Kill and damage a run, and compare its end with that of an undisturbed one: see `python tools/chaos.py --help`."""

import door

if __name__ == "__main__":
    door.enter("chaos")
