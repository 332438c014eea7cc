"""Messages for a user about file errors of the operating system: the file, the reason and a cure."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
CURES = {
    errno.EACCES: "change the permissions of the file or folder, or name another path",
    errno.EPERM: "change the permissions of the file or folder, or name another path",
    errno.EROFS: "name a path on a file system that can be written to",
    errno.ENOTDIR: "a part of this path is a file, not a folder: name another path",
    errno.EISDIR: "this path is a folder: name a file",
    errno.ELOOP: "this path leads through a loop of symbolic links: name another path",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EFBIG: "the file exceeds the maximum file size: raise the limit (ulimit -f), or name another file system",
}


def is_of_the_user(error: OSError) -> bool:
    """Return True if the user can cure a file error, such as a full disk or a missing permission."""
    return error.errno in CURES or error.errno in FULL


def in_words(error: OSError, place: Path | None = None) -> str:
    """Return a message for a file error: the file's path, the reason and a cure.

    If the error names no file, the message names `place`.
    """
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
    """Return the end of a message about a full disk: the bytes `needed`, the free space and a cure.

    Return an empty string for an error other than a full disk.
    """
    if not (isinstance(error, OSError) and error.errno in FULL):
        return ""
    existing = next((folder for folder in (place, *place.parents) if folder.is_dir()), Path("/"))
    if needed is None:
        wanted = ""
    else:
        wanted = f"{needed / 1e6:,.1f} MB are needed, and "
    free = shutil.disk_usage(existing).free / 1e6
    return f"; {wanted}{free:,.1f} MB are free at {existing}: delete files there, or name a path on another disk"
