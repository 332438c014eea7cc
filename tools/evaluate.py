"""How a checkpoint reads text that is longer than what it was trained on: see `python tools/evaluate.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package, also where none is installed

from hybridtron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
