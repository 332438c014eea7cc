"""Safe reading of untrusted paths: only regular files, up to a size limit.

Symbolic links are followed. Devices, pipes and folders are refused: reading /dev/zero never ends, and opening a pipe
may block forever.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path


class Unreadable(OSError):
    """Raised if a path exists but is not a regular file, or if the file is too large to read."""


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered. Raises Unreadable if the path is not a regular file."""
    _check(path.stat())  # before opening, because opening a device can already have an effect
    file = FileIO(path, opener=_without_waiting)
    try:
        _check(os.fstat(file.fileno()))  # again, because another file may have replaced the checked file
    except Unreadable:
        file.close()
        raise
    return file


def require_regular(path: Path) -> None:
    """Raise Unreadable if a path is not a regular file. Use this for files that another package opens by path."""
    _check(path.stat())


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file. Raises Unreadable if the path is not a regular file, or has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise Unreadable(f"has {size:,} bytes, more than {limit:,}")
        with BufferedReader(file) as reader:
            return reader.read(size)


def path_inside(root: Path, relative: str) -> Path | None:
    """Return the path of a file below a folder, or None if `relative` could lead out of the folder.

    A path could lead out of the folder if it is absolute, contains `..`, or goes through a symbolic link.
    """
    path = root
    for part in relative.split("/"):
        path = path / part
        if part in ("", ".", "..") or "\0" in part or path.is_symlink():
            return None
    return path


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable("not a regular file")
