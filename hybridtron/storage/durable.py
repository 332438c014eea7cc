"""Writing so that it is on disk when this returns, whatever happens to the machine then."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file that was closed, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_of(path: Path) -> Path:
    """Where a file or a folder stands until it has its name; a process that is killed leaves it there."""
    return path.with_name(f".{path.name}.temporary")


def put(path: Path, stored: bytes) -> None:
    """A file that appears whole, in place of one that may be there, and stays."""
    temporary = temporary_of(path)
    temporary.write_bytes(stored)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
