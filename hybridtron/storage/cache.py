"""The cache on this machine: which files are present and verified, which process fetches a file, and which are evicted.

    FOLDER/.lock                               held while files are evicted to make room
    FOLDER/<digest of the dataset's name>/     an entry: one dataset, with its own layout
        KEY                                    a complete file; nothing else ever has this name
        .verified/KEY                          a verified file's size, time, inode and digest; its mtime: last use
        .locks/KEY                             held while a file is fetched
        .staging/KEY/                          temporary folder of a fetch; the next fetch removes a killed process's

Keys are paths below the dataset's root. Only files with a mark in .verified can be evicted: shards, but not the few
small files beside them. A dataset that is read in place has an entry with marks alone. Locks are the kernel's (flock)
and end with their process. This module neither downloads (`fetch.py`) nor knows the format of a shard.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybridtron.storage.attempts import Damaged, Patience, StorageError
from hybridtron.storage.digest import digest_of

_NAMES = 16  # characters of a digest that name an entry
_LOOK_S = 0.05  # seconds between two tries to take a lock, or to find room


@dataclass(frozen=True)
class CacheOptions:
    """Settings of the cache: its folder, its limit in bytes (None: unlimited), and the retry policy for stores."""

    folder: Path
    limit: int | None = None
    patience: Patience = field(default_factory=Patience)


@contextmanager
def disk_advice(options: CacheOptions, size: int) -> Iterator[None]:
    """Convert errors of the cache's disk into a StorageError with advice; other errors pass unchanged.

    size: bytes that were to be written, for the message
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the cache {options.folder} has no room for {size} bytes ({error.strerror}): free some, move it with "
                "data.cache, or let it drop shards with a smaller data.cache_limit"
            ) from error
        is_cache_file = error.filename is None or str(error.filename).startswith(str(options.folder))
        if is_cache_file and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise StorageError(
                f"the cache {options.folder} can't be written ({error.strerror}), and {size} bytes have to be: name a "
                "folder of yours with data.cache"
            ) from error
        raise


class CacheEntry:
    """The cached files of one dataset."""

    def __init__(self, options: CacheOptions, dataset: str) -> None:
        self.options = replace(options, folder=options.folder.absolute())
        self.root = self.options.folder / digest_of(dataset.encode())[:_NAMES]
        self._known: dict[str, list[int | str]] = {}  # contents of the marks, for a cache that can't be written

    def open(self, path: Path, key: str, size: int, digest: str) -> mmap.mmap:
        """Map a file into memory; raise Damaged if its size or digest is wrong.

        The digest is computed once per file. A mark then records size, mtime, inode and digest, and is valid while
        these stay the same. Opening a file updates the mark's mtime, the time of last use. A symbolic link raises
        OSError.
        """
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != size:
                raise Damaged("is empty" if not status.st_size else f"has {status.st_size} of {size} bytes")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        state = [status.st_size, status.st_mtime_ns, status.st_ino, digest]
        if self._known.get(key) != state and self._marked(key) != state:
            if digest_of(mapped) != digest:
                raise Damaged("differs from its digest in the manifest")
            self._mark(key, state)
        self._known[key] = state
        with suppress(OSError):
            os.utime(self._mark_file(key))
        return mapped

    def forget(self, path: Path, key: str) -> None:
        """Delete a file from the cache, with its mark."""
        path.unlink(missing_ok=True)
        self._mark_file(key).unlink(missing_ok=True)

    @contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """Hold the lock under which a file is fetched; raise StorageError after waiting for `seconds`."""
        with _locked(self.root / ".locks" / key, seconds):
            yield

    @contextmanager
    def staging(self, key: str, size: int | None = None) -> Iterator[Path]:
        """Create an empty temporary folder in which to prepare a file, and remove it at the end.

        The caller holds the file's lock. With `size`, and if the cache has a limit, other files are evicted to reserve
        that number of bytes.
        """
        folder = self.root / ".staging" / key
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.options.limit is not None and size is not None:
                self._reserve(folder, size)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _reserve(self, folder: Path, size: int) -> None:
        """Evict files until `size` bytes fit, and record the reservation in `folder`.

        Raises StorageError if the fetches of other processes leave no room for too long.
        """
        patience = self.options.patience.total(size)
        end = time.monotonic() + patience
        while True:
            with _locked(self.options.folder / ".lock", patience):
                if make_room(self.options, size):
                    (folder / ".reserved").write_text(str(size))
                    return
            if time.monotonic() > end:
                raise StorageError(
                    f"the cache {self.options.folder} of {self.options.limit} bytes is full of shards that other "
                    f"processes are fetching, and {size} bytes have to fit: raise data.cache_limit"
                )
            time.sleep(_LOOK_S)

    def _mark_file(self, key: str) -> Path:
        return self.root / ".verified" / key

    def _marked(self, key: str) -> object:
        try:
            return json.loads(self._mark_file(key).read_bytes())
        except (OSError, ValueError):
            return None

    def _mark(self, key: str, state: list[int | str]) -> None:
        mark = self._mark_file(key)
        temporary = mark.with_name(f".{mark.name}.{secrets.token_hex(4)}")
        with suppress(OSError):  # without a mark, every process verifies the file once
            mark.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(state))
            temporary.replace(mark)


def make_room(options: CacheOptions, size: int) -> bool:
    """Evict the least recently used files until `size` bytes fit; return False if reservations leave too little.

    If even an empty cache would leave too little, no file is evicted. The caller holds the cache's lock. An evicted
    file stays readable where it is mapped.
    """
    assert options.limit is not None
    reserved = _reserved(options.folder)  # first: a file that is completed meanwhile then counts twice, not never
    free_if_empty = options.limit - size - reserved
    if free_if_empty < 0:
        return False
    files = sorted(_evictable(options.folder))
    free = free_if_empty - sum(num_bytes for _, num_bytes, _, _ in files)
    for _, num_bytes, file, mark in files:
        if free >= 0:
            break
        file.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
        free += num_bytes
    return free >= 0


def _evictable(folder: Path) -> Iterator[tuple[int, int, Path, Path]]:
    """Yield the last use, the bytes, the path and the mark of every file with a mark."""
    for entry in _entries(folder):
        for mark in _files(entry / ".verified"):
            file = entry / mark.relative_to(entry / ".verified")
            with suppress(FileNotFoundError):  # the file is read in place, outside the cache, or was evicted meanwhile
                yield mark.stat().st_mtime_ns, file.lstat().st_size, file, mark


def _reserved(folder: Path) -> int:
    """Return the bytes that processes are fetching now.

    A killed process holds no lock, so its reservation is recognized and removed.
    """
    total = 0
    for entry in _entries(folder):
        for reserved in [file for file in _files(entry / ".staging") if file.name == ".reserved"]:
            lock = entry / ".locks" / reserved.parent.relative_to(entry / ".staging")
            try:
                with _locked(lock, 0):
                    shutil.rmtree(reserved.parent, ignore_errors=True)
            except StorageError:
                with suppress(OSError, ValueError):
                    total += int(reserved.read_text())
    return total


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if len(path.name) == _NAMES]


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder. os.walk skips folders that are removed meanwhile; Path.rglob would raise."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


@contextmanager
def _locked(file: Path, seconds: float) -> Iterator[None]:
    """Hold a lock file; raise StorageError after waiting for `seconds`.

    The file is never removed: otherwise two processes could each hold a lock with the same name.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + seconds
    try:
        while not _taken(descriptor):
            if time.monotonic() >= end:
                raise StorageError(f"another process has held {file} for {seconds:.0f} seconds: is it stopped?")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _taken(descriptor: int) -> bool:
    """Take a lock without waiting; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
