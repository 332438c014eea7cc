"""Messages for files that the operating system refuses: which file, why, and what a user can do about it."""

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
    """Check whether an error is of a place that the user named, and can mend."""
    return error.errno in CURES or error.errno in FULL


def in_words(error: OSError, place: Path | None = None) -> str:
    """Name the file, or the place that was written to, with what would help."""
    where = error.filename if error.filename is not None else place
    text = str(error) if where is None or error.strerror is None else f"{where}: {error.strerror}"
    if error.errno in FULL:
        return f"{text}{room_left(error, Path(where) if where else Path.cwd())}"
    return f"{text}; {CURES[error.errno]}" if error.errno in CURES else text


def room_left(error: Exception, place: Path, needed: int | None = None) -> str:
    """Say how much room a full disk has, of the bytes that are needed, and what to do; nothing for another error."""
    if not (isinstance(error, OSError) and error.errno in FULL):
        return ""
    existing = next((folder for folder in (place, *place.parents) if folder.is_dir()), Path("/"))
    wanted = "" if needed is None else f"{needed / 1e6:,.1f} MB are needed, and "
    free = shutil.disk_usage(existing).free / 1e6
    return f"; {wanted}{free:,.1f} MB are free at {existing}: make room there, or name a place on another disk"
