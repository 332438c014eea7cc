"""Messages for a user about file errors of the operating system: the file, the reason and a cure."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
CURES = {
    errno.EACCES: "it belongs to another user: change its rights, or name another place",
    errno.EPERM: "it belongs to another user: change its rights, or name another place",
    errno.EROFS: "name a place that can be written to",
    errno.ENOTDIR: "a part of this path is a file: name a folder",
    errno.EISDIR: "it is a folder: name a file",
    errno.ELOOP: "links there lead in a circle: name the place itself",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EFBIG: "no file there may be as large: raise the limit (ulimit -f), or name another place",
}


def is_of_the_user(error: OSError) -> bool:
    """Return True if the user can cure a file error, such as a full disk or a path without permission."""
    return error.errno in CURES or error.errno in FULL


def in_words(error: OSError, place: Path | None = None) -> str:
    """Format a file error with the file's name and a cure. `place` is the output path if the error names no file."""
    where = error.filename if error.filename is not None else place
    if where is None or error.strerror is None:
        text = str(error)
    else:
        text = f"{where}: {error.strerror}"
    if error.errno in FULL:
        return f"{text}{room_left(error, Path(where) if where else Path.cwd())}"
    if error.errno in CURES:
        return f"{text}; {CURES[error.errno]}"
    return text


def room_left(error: Exception, place: Path, needed: int | None = None) -> str:
    """Format a full disk's free space, the bytes `needed` and a cure. Empty for any other error."""
    if not (isinstance(error, OSError) and error.errno in FULL):
        return ""
    existing = next((folder for folder in (place, *place.parents) if folder.is_dir()), Path("/"))
    if needed is None:
        wanted = ""
    else:
        wanted = f"{needed / 1e6:,.1f} MB are needed, and "
    free = shutil.disk_usage(existing).free / 1e6
    return f"; {wanted}{free:,.1f} MB are free at {existing}: make room there, or name a place on another disk"
