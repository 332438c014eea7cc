"""Text or tokens into a folder of prepared tokens: see `python tools/prepare_data.py --help`."""

import door

if __name__ == "__main__":
    door.enter("data", "prepare")
