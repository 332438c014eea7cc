"""Text from a checkpoint: see `python tools/generate.py --help`."""

import door

if __name__ == "__main__":
    door.enter("generate")
