"""Folders that nobody but this user and root can change, for code that this process will run.

    with own_folder(base, "hybridtron", "native") as folder:
        folder.open("library.so")

Every folder on the way is opened by the one before it, without following links, and must belong to the user or to root.
Nobody else may write to it, since a user who can rename its files can exchange them; a sticky folder such as /tmp
forbids that. A group may write where it is the user's alone: it has the user's name (or is root's) and lists nobody
else, as on systems that give each user a group. A mode shows the widest right of an access list as the group's, so that
access lists count too.

Which folders are looked at:

    below `base`    all, and their names may be no links
    `base`          what it resolves to, from the root on: homes are often behind links (/home -> /data/home)
    above the home  none, where `base` is below it: who can exchange a home runs code as its user anyway, by what a
                    shell reads there, and clusters have owners of their own for the folders of all homes

On the way to `base` the owner of / counts as root, who in a container without rights has another number.
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

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)  # needs no right to list
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotOwn(OSError):
    """Somebody else owns a file or a folder, or could change it; the message names it and the cure."""


@dataclass(frozen=True)
class OwnFolder:
    """An open folder; `path` holds no links."""

    path: Path
    descriptor: int

    def open(self, name: str) -> BufferedReader:
        """A regular file of the user's or root's. Raises NotOwn where others own it, OSError if it is anything else."""
        descriptor = os.open(name, _FILE, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("is no regular file")
            if status.st_uid not in (0, os.getuid()):
                raise NotOwn(f"{self.path / name} belongs to another user ({status.st_uid}): remove it")
            if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _of_one_user(status.st_gid)):
                raise OSError("could be changed by others")
        except OSError:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")


@contextmanager
def own_folder(base: Path, *names: str) -> Iterator[OwnFolder]:
    """The folder below `base`, made where it is absent. Raises NotOwn, or OSError with the folder's name."""
    resolved = Path(os.path.realpath(base))
    unseen = _above_the_home(resolved)
    path = Path(resolved.anchor)
    descriptor = os.open(path, _FOLDER)
    try:
        owners = {0, os.getuid(), os.fstat(descriptor).st_uid}
        for part in resolved.parts[1:]:
            path = path / part
            descriptor = _into(descriptor, path)
            if path not in unseen:
                _check(path, os.fstat(descriptor), owners)
        for part in names:
            path = path / part
            descriptor = _into(descriptor, path)
            _check(path, os.fstat(descriptor), {0, os.getuid()})
        yield OwnFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _above_the_home(path: Path) -> set[Path]:
    """The folders above the user's home, if the path is below it."""
    try:
        home = Path(os.path.realpath(Path.home()))
    except RuntimeError:  # the user has none
        return set()
    return {*home.parents} if home in (path, *path.parents) else set()


def _into(descriptor: int, path: Path) -> int:
    """The folder that `path` names, opened by the one before it, which is closed."""
    try:
        try:
            inside = os.open(path.name, _FOLDER, dir_fd=descriptor)
        except FileNotFoundError:
            _make(path.name, descriptor)
            inside = os.open(path.name, _FOLDER, dir_fd=descriptor)
    except OSError as error:
        if _is_link(path.name, descriptor):
            raise NotOwn(f"{path} is a link, which is not followed") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.close(descriptor)
    return inside


def _make(name: str, descriptor: int) -> None:
    with suppress(FileExistsError):  # by another process, meanwhile
        os.mkdir(name, 0o700, dir_fd=descriptor)


def _is_link(name: str, descriptor: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check(path: Path, found: os.stat_result, owners: set[int]) -> None:
    if found.st_uid not in owners:
        raise NotOwn(f"{path} belongs to another user ({found.st_uid})")
    if found.st_mode & stat.S_ISVTX:
        return
    if found.st_mode & stat.S_IWOTH:
        raise NotOwn(f"{path} can be changed by every user: chmod go-w {path}")
    if found.st_mode & stat.S_IWGRP and not _of_one_user(found.st_gid):
        raise NotOwn(f"{path} can be changed by its group ({found.st_gid}): chmod g-w {path}")


def _of_one_user(group: int) -> bool:
    """Check whether a group is the user's own, or root's, and nobody else is in it."""
    try:
        user = pwd.getpwuid(os.getuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    is_own = group == 0 or (group == user.pw_gid and entry.gr_name == user.pw_name)
    return is_own and {*entry.gr_mem} <= {"root", user.pw_name}


def write_whole(folder: Path, names: Sequence[str], fill: Callable[[Path], None]) -> None:
    """Let `fill` write files to a temporary folder; they get their names in this order, and then stay."""
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
    """Move away a folder, which no file can replace: before the work is done, and with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        moved = path.with_name(f"{path.name}.moved")
        try:
            path.replace(moved)
        except OSError as error:
            cause = f"can't be moved to {moved.name} ({error.strerror})"
            raise OSError(f"{path} is a folder, and {cause}: remove both") from None


def sync(path: Path) -> None:
    """Wait until a file that was closed, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
