"""Safe reading of untrusted paths: only regular files, up to a size limit.

Links are followed, but devices, pipes and folders are refused: reading /dev/zero never ends, and opening a pipe may
block forever.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path


class Unreadable(OSError):
    """Raised if a path exists but is not a regular file, or is too large to read."""


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered. Raises Unreadable if it is anything else."""
    _check(path.stat())  # before opening, since opening alone triggers some devices
    file = FileIO(path, opener=_without_waiting)
    try:
        _check(os.fstat(file.fileno()))  # again, since the path may have been replaced
    except Unreadable:
        file.close()
        raise
    return file


def require_regular(path: Path) -> None:
    """Raise Unreadable if a path is not a regular file, before another package opens it by its name."""
    _check(path.stat())


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file. Raises Unreadable if it is anything else, or has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise Unreadable(f"has {size:,} bytes, more than {limit:,}")
        return BufferedReader(file).read(size)


def path_inside(root: Path, relative: str) -> Path | None:
    """Return the path of a file below a folder.

    None if the relative path leaves the folder or could: by `..`, an absolute path or a link.
    """
    path = root
    for part in relative.split("/"):
        path = path / part
        if part in ("", ".", "..") or "\0" in part or path.is_symlink():
            return None
    return path


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable("not a regular file")
