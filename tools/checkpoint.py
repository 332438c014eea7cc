"""List, verify, compare, rewrite and fetch checkpoints: see `python tools/checkpoint.py --help`."""

import door

if __name__ == "__main__":
    door.enter("checkpoint")
