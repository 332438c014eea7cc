"""Folders that only this user and root can change, for files with code to run in this process.

    with own_folder(base, "hybridtron", "native") as folder:
        folder.open("library.so")

Each folder of the path is opened relative to its parent, without following links, and must belong to the user or to
root. No other user may have write permission for the folder, because such a user could replace its files by renaming.
Two cases are accepted nevertheless:

- A folder with the sticky bit, such as /tmp, because other users can't rename this user's files there.
- Write permission for a group that has no members but the user and root, and that is root's group or has the user's
  name. Many systems give each user such a group.

Access lists (ACLs) are covered too, because the group bits of a file's mode include their permissions.

These folders are checked:

    below `base`      all folders; a link is an error
    / to `base`       all folders, after links are resolved, because homes are often behind links (/home -> /data/home).
                      Exception: if `base` is in the user's home, the folders above the home are not checked. On
                      clusters these folders often have other owners. An attacker who can replace the home can run code
                      as the user anyway, through the files that a shell reads there

In the path of `base`, the owner of / is accepted like root, because in an unprivileged container the owner of / has
another user number than 0.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

# O_PATH needs no permission to list the folder
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotOwn(OSError):
    """Raised when another user owns a file or a folder, or could change it; the message names the path."""


@dataclass(frozen=True)
class OwnFolder:
    """An open folder. `descriptor` is its file descriptor, and `path` is its path without links."""

    path: Path
    descriptor: int

    def open(self, name: str) -> BufferedReader:
        """Open a regular file of the user or root for reading.

        Raises NotOwn if another user owns the file. Raises OSError if the file is not regular, or if other users have
        permission to write to it.
        """
        descriptor = os.open(name, _FILE, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("is not a regular file")
            if status.st_uid not in (0, os.getuid()):
                raise NotOwn(f"{self.path / name} belongs to another user ({status.st_uid}): remove the file")
            if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _of_one_user(status.st_gid)):
                raise OSError("could be changed by others")
        except OSError:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")


@contextmanager
def own_folder(base: Path, *names: str) -> Iterator[OwnFolder]:
    """Open the folder `base`/NAME/NAME... and check all folders of its path; missing folders are created.

    Raises NotOwn if another user could change a folder of the path, and OSError if a folder can't be opened.
    """
    resolved = Path(os.path.realpath(base))
    unchecked = _above_the_home(resolved)
    path = Path(resolved.anchor)
    descriptor = os.open(path, _FOLDER)
    try:
        owners = {0, os.getuid(), os.fstat(descriptor).st_uid}
        for part in resolved.parts[1:]:
            path = path / part
            descriptor = _into(descriptor, path)
            if path not in unchecked:
                _check(path, os.fstat(descriptor), owners)
        for part in names:
            path = path / part
            descriptor = _into(descriptor, path)
            _check(path, os.fstat(descriptor), {0, os.getuid()})
        yield OwnFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _above_the_home(path: Path) -> set[Path]:
    """Return the folders above the user's home if the path is in the home, else an empty set."""
    try:
        home = Path(os.path.realpath(Path.home()))
    except RuntimeError:  # the user has no home
        return set()
    if home in (path, *path.parents):
        return {*home.parents}
    return set()


def _into(descriptor: int, path: Path) -> int:
    """Open a folder relative to its parent's descriptor, and close the parent. A missing folder is created.

    Raises NotOwn if the folder is a link.
    """
    try:
        try:
            inside = os.open(path.name, _FOLDER, dir_fd=descriptor)
        except FileNotFoundError:
            _make(path.name, descriptor)
            inside = os.open(path.name, _FOLDER, dir_fd=descriptor)
    except OSError as error:
        if _is_link(path.name, descriptor):
            raise NotOwn(f"{path} is a link, which is not followed: replace the link by a folder") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.close(descriptor)
    return inside


def _make(name: str, descriptor: int) -> None:
    with suppress(FileExistsError):  # another process may create it first
        os.mkdir(name, 0o700, dir_fd=descriptor)


def _is_link(name: str, descriptor: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check(path: Path, status: os.stat_result, owners: set[int]) -> None:
    """Raise NotOwn if a folder belongs to another user, or if other users can rename files in it."""
    if status.st_uid not in owners:
        raise NotOwn(f"{path} belongs to another user ({status.st_uid})")
    if status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH:
        raise NotOwn(f"{path} can be changed by every user: chmod go-w {path}")
    if status.st_mode & stat.S_IWGRP and not _of_one_user(status.st_gid):
        raise NotOwn(f"{path} can be changed by its group ({status.st_gid}): chmod g-w {path}")


def _of_one_user(group: int) -> bool:
    """Return True if a group is the user's own or root's, and has no members but the user and root."""
    try:
        user = pwd.getpwuid(os.getuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    is_own = group == 0 or (group == user.pw_gid and entry.gr_name == user.pw_name)
    return is_own and {*entry.gr_mem} <= {"root", user.pw_name}


def write_whole(folder: Path, names: Sequence[str], fill: Callable[[Path], None]) -> None:
    """Write several files, each atomically, and flush them to disk.

    `fill` writes files with these names to a temporary folder. Then they are moved to `folder` in the order of `names`.
    """
    for name in names:
        _make_room(folder / name)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as temporary:
        fill(Path(temporary))
        for name in names:
            sync(Path(temporary, name))
        for name in names:
            Path(temporary, name).replace(folder / name)
    sync(folder)


def _make_room(path: Path) -> None:
    """Rename a folder that occupies the path of a file to be written, because a file can't replace a folder.

    Making the files may take long, so call this function before, to get errors early. Raises OSError if the folder
    can't be renamed.
    """
    if path.is_dir() and not path.is_symlink():
        moved = path.with_name(f"{path.name}.moved")
        try:
            path.replace(moved)
        except OSError as error:
            cause = f"can't be moved to {moved.name} ({error.strerror})"
            raise OSError(f"{path} is a folder, and {cause}: remove both") from None


def sync(path: Path) -> None:
    """Flush a closed file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
