"""How a checkpoint reads text that is longer than what it was trained on: see `python tools/evaluate.py --help`."""

import door

if __name__ == "__main__":
    door.enter("evaluate")
