"""What every program of this folder does: one command of `hybridtron`, with this checkout's package."""

import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where none is installed

from hybridtron.cli.main import main


def enter(*command: str) -> NoReturn:
    """Run the command with the program's arguments."""
    sys.exit(main([*command, *sys.argv[1:]]))
