"""Runs the command `hybridtron` for `python -m hybridtron` and `torchrun -m hybridtron train ...`."""

import sys

from hybridtron.cli.main import program

if __name__ == "__main__":
    sys.exit(program())
