"""Check a GPU: correctness of every kernel, and speed: see `python tools/gpu_check.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package, also where none is installed

from hybridtron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["gpu-check", *sys.argv[1:]]))
