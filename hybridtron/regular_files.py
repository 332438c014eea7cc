"""Reading a file that somebody else may have put there: only if it is a regular one, and only as much as it may hold.

A link is followed, but not to a device, a pipe or a folder: /dev/zero never ends, and a pipe may never begin.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path


class Unreadable(OSError):
    """There is something, but no file of a size that can be read."""


def open_regular(path: Path) -> FileIO:
    """A regular file, open for reading, without a buffer. Raises Unreadable where it is anything else."""
    _check(path.stat())  # before it is opened, as opening alone makes some devices act
    file = FileIO(path, opener=_without_waiting)
    try:
        _check(os.fstat(file.fileno()))  # it may have been replaced since
    except Unreadable:
        file.close()
        raise
    return file


def require_regular(path: Path) -> None:
    """Raise Unreadable where a path is no regular file, for what another package opens by its name."""
    _check(path.stat())


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of a regular file. Raises Unreadable where it is anything else, or has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise Unreadable(f"has {size:,} bytes, more than {limit:,}")
        return BufferedReader(file).read(size)


def path_inside(root: Path, relative: str) -> Path | None:
    """A file below a folder; None where the path leads out of it, or could: by `..`, a root of its own or any link."""
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
