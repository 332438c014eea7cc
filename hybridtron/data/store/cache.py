"""The cache on this machine: which shards are there and known to be right, who fetches one, and which one has to go.

    FOLDER/.lock                               held while room is made
    FOLDER/<digest of the dataset's name>/     an entry: one dataset, laid out as itself
        train/SOURCE/PART/shard.00000.mds      a shard as it is read; nothing else ever has this name
        .verified/KEY                          the state of a file whose digest was right; its mtime: last use
        .locks/KEY                             held while a shard is made present
        .staging/KEY/                          where that happens; left by a killed process, it is removed by the next

A dataset that is read in place has an entry of marks alone. Locks are the kernel's (flock): they end with their
process. Nothing here downloads (`fetch.py`) or knows what a shard holds (`mds.py`).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from hybridtron.data.folder import SPLITS, DataShard, digest_of, path_inside

SLOWEST = 2**20  # bytes per second; a large file may take longer than the timeout, at this rate
PAUSE = 1.0  # seconds, at most, between one attempt and the next
_NAMES = 16  # characters of a digest that name an entry


class DataError(RuntimeError):
    """Reading failed. Names the dataset, the shard, and the sample where one is concerned."""


class Damaged(Exception):
    """What is wrong with a shard's file."""


@dataclass(frozen=True)
class CacheOptions:
    """Where shards are kept, how many bytes of them, and how long an attempt to fetch one may take."""

    folder: Path
    limit: int | None = None
    timeout: float = 60.0
    retries: int = 2

    def deadline(self, size: int) -> float:
        """Seconds that one attempt to fetch so many bytes may take."""
        return max(self.timeout, size / SLOWEST)

    def patience(self, size: int) -> float:
        """Seconds that all attempts may take together, which is what others wait."""
        return (self.retries + 1) * (self.deadline(size) + PAUSE)


def inside(root: Path, relative: str) -> Path:
    """A file below a folder, by a path in which nothing is a symbolic link; DataError otherwise."""
    path = path_inside(root, relative)
    if path is None:
        raise DataError(f"{root} names {relative!r}, which leads, or could lead, out of the folder: not opened")
    return path


def disk_trouble(options: CacheOptions, error: OSError, size: int) -> str | None:
    """What to do about an error of the cache's disk; None if it is another's."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the cache {options.folder} has no room for {size} bytes ({error.strerror}): free some, move it with "
            "data.cache, or let it drop shards with a smaller data.cache_limit"
        )
    of_cache = error.filename is None or str(error.filename).startswith(str(options.folder))
    if of_cache and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return (
            f"the cache {options.folder} can't be written ({error.strerror}), and {size} bytes have to be: name a "
            "folder of yours with data.cache"
        )
    return None


class Entry:
    """What the cache holds of one dataset. Keys are paths below the dataset's root."""

    def __init__(self, options: CacheOptions, dataset: str) -> None:
        self.options = replace(options, folder=options.folder.absolute())
        self.root = self.options.folder / digest_of(dataset.encode())[:_NAMES]
        self._known: dict[str, list[int | str]] = {}  # as the marks, for a cache that can't be written

    def open(self, path: Path, key: str, shard: DataShard) -> mmap.mmap:
        """The bytes of a shard's file, mapped; Damaged if they are not the ones that the manifest tells of."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != shard.size:
                kind = "is empty" if not status.st_size else f"has {status.st_size} of {shard.size} bytes"
                raise Damaged(kind)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        state = [status.st_size, status.st_mtime_ns, status.st_ino, shard.digest]
        if self._known.get(key) != state and self._marked(key) != state:
            if digest_of(mapped) != shard.digest:
                raise Damaged("differs from its digest in the manifest")
            self._mark(key, state)
        self._known[key] = state
        with suppress(OSError):
            os.utime(self._mark_file(key))
        return mapped

    def forget(self, path: Path, key: str) -> None:
        """Throw a file of the cache away."""
        path.unlink(missing_ok=True)
        self._mark_file(key).unlink(missing_ok=True)

    @contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """Be the only one that makes a file of the cache present; DataError after so many seconds."""
        with _locked(self.root / ".locks" / key, seconds):
            yield

    @contextmanager
    def staging(self, key: str, size: int | None = None) -> Iterator[Path]:
        """A folder in which a file is made ready, with room for so many bytes of a shard; its lock must be held."""
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
        """Evict until there is room, and write down that it is taken."""
        end = time.monotonic() + self.options.patience(size)
        while True:
            with _locked(self.options.folder / ".lock", self.options.patience(size)):
                if make_room(self.options, size):
                    (folder / ".reserved").write_text(str(size))
                    return
            if time.monotonic() > end:
                raise DataError(
                    f"the cache {self.options.folder} of {self.options.limit} bytes is full of shards that other "
                    f"processes are fetching, and {size} bytes have to fit: raise data.cache_limit"
                )
            time.sleep(0.05)

    def _mark_file(self, key: str) -> Path:
        return self.root / ".verified" / key

    def _marked(self, key: str) -> object:
        try:
            return json.loads(self._mark_file(key).read_bytes())
        except (OSError, ValueError):
            return None

    def _mark(self, key: str, state: list[int | str]) -> None:
        mark = self._mark_file(key)
        aside = mark.with_name(f".{mark.name}.{secrets.token_hex(4)}")
        with suppress(OSError):  # then the file is verified once per process
            mark.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(state))
            aside.replace(mark)


def make_room(options: CacheOptions, size: int) -> bool:
    """Evict the least recently used shards until so many bytes fit under the limit; the cache's lock must be held.

    False if what others are fetching leaves too little. A shard that is mapped somewhere stays readable there.
    """
    assert options.limit is not None
    from hybridtron.data.store.mosaic import (  # it imports torch, which reading in place does without
        FileInfo,
        MDSReader,
    )

    reserved = _reserved(options.folder)  # first: what is put in its place meanwhile counts twice, not never
    shards = sorted(_shards(options.folder))
    free = options.limit - size - reserved - sum(bytes_ for _, bytes_, _, _ in shards)
    for _, bytes_, entry, key in shards:
        if free >= 0:
            break
        folder, name = entry / "/".join(key.split("/")[:2]), "/".join(key.split("/")[2:])
        MDSReader(str(folder), None, [], [], [], None, [], FileInfo(name, bytes_, {}), 0, None, None).evict()
        (entry / ".verified" / key).unlink(missing_ok=True)
        free += bytes_
    return free >= 0


def _shards(folder: Path) -> Iterator[tuple[int, int, Path, str]]:
    """Every shard of the cache: when it was used, its bytes, its entry and its key."""
    for entry in _entries(folder):
        for file in (file for split in SPLITS for file in _files(entry / split) if file.suffix == ".mds"):
            key = file.relative_to(entry).as_posix()
            with suppress(FileNotFoundError):
                status = file.lstat()
                mark = entry / ".verified" / key
                used = mark.stat().st_mtime_ns if mark.exists() else status.st_mtime_ns
                yield used, status.st_size, entry, key


def _reserved(folder: Path) -> int:
    """Bytes that processes are fetching now. What a killed one left is removed: nobody holds its lock."""
    total = 0
    for entry in _entries(folder):
        for reserved in [file for file in _files(entry / ".staging") if file.name == ".reserved"]:
            lock = entry / ".locks" / reserved.parent.relative_to(entry / ".staging")
            lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(lock, timeout=0):
                    shutil.rmtree(reserved.parent, ignore_errors=True)
            except Timeout:
                with suppress(OSError, ValueError):
                    total += int(reserved.read_text())
    return total


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if len(path.name) == _NAMES]


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder; os.walk passes over folders that others remove meanwhile, Path.rglob raises."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


@contextmanager
def _locked(file: Path, seconds: float) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, timeout=seconds)
    try:
        lock.acquire()
    except Timeout as error:
        raise DataError(f"another process has held {file} for {seconds:.0f} seconds: is it stopped?") from error
    try:
        yield
    finally:
        lock.release()
