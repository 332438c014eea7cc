"""Entry point of `python -m hybridtron` and `torchrun -m hybridtron train ...`, equal to the command `hybridtron`."""

import sys

from hybridtron.cli.main import program

if __name__ == "__main__":
    sys.exit(program())
