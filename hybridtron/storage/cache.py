"""The local cache of a dataset's files: each digest is verified once, and the least recently used shards are evicted.

    FOLDER/.lock                               locked while shards are evicted to make room
    FOLDER/<digest of the dataset's name>/     the entry of one dataset:
        KEY                                    a complete file; an incomplete file never has this path
        .verified/KEY                          a mark: the size, mtime, inode and digest of the verified file KEY;
                                               the mark's own mtime is the time at which KEY was last used
        .locks/KEY                             locked while KEY is fetched
        .staging/KEY/                          temporary folder while KEY is fetched; if the process is killed, a later
                                               fetch removes the folder

KEY is the file's path below the dataset's root. Only files with a mark can be evicted: the data shards. A dataset's few
small files, such as its index, have no mark and stay in the cache. If the dataset is on a local disk, files are read
from that disk, and the entry holds only marks, unless the dataset is copied (`cluster.stage`). Locks are taken with
flock(2), so the kernel releases a process's locks when the process ends. `fetch.py` downloads the files.
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

from hybridtron.storage.digest import digest_of
from hybridtron.storage.retry import Damaged, RetryPolicy, StorageError

_ENTRY_NAME_LENGTH = 16  # number of a digest's first characters that form an entry's name
_POLL_S = 0.05  # seconds between two attempts to take a lock or to reserve space


@dataclass(frozen=True)
class CacheOptions:
    """Settings of the cache.

    folder: the cache's folder
    limit: maximum size in bytes; None for no limit
    patience: retry policy for downloads
    key: configuration key of the folder, for messages
    """

    folder: Path
    limit: int | None = None
    patience: RetryPolicy = field(default_factory=RetryPolicy)
    key: str = "data.cache"


@contextmanager
def disk_advice(options: CacheOptions, size: int) -> Iterator[None]:
    """Inside the block, replace the OSError for a full disk or an unwritable cache by a StorageError with advice.

    Other errors are raised unchanged. `size` is the number of bytes that the block writes, for the message.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = f"free disk space, or set {options.key} to a folder on another disk"
            if options.key == "data.cache":  # other folders hold copies of all data, and evict none
                cure += ", or evict old shards with a smaller data.cache_limit"
            raise StorageError(
                f"can't be cached: {options.folder} has no room for {size} bytes ({error.strerror}); {cure}"
            ) from error
        is_cache_file = error.filename is None or Path(str(error.filename)).is_relative_to(options.folder)
        if is_cache_file and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise StorageError(
                f"can't be cached: the folder {options.folder} can't be written ({error.strerror}), but {size} "
                f"bytes must be stored in it; set {options.key} to a folder that you can write"
            ) from error
        raise


class CacheEntry:
    """The cached files of one dataset."""

    def __init__(self, options: CacheOptions, dataset: str) -> None:
        self.options = replace(options, folder=options.folder.absolute())
        self.root = self.options.folder / digest_of(dataset.encode())[:_ENTRY_NAME_LENGTH]
        # key -> mark; kept in memory too, because a mark's file may be impossible to write
        self._marks: dict[str, list[int | str]] = {}

    def open(self, path: Path, key: str, size: int, digest: str) -> mmap.mmap:
        """Map a file into memory; raise Damaged if its size or digest is wrong.

        The digest is computed at the first opening. Then a mark records the file's size, mtime, inode and digest, and
        the digest is not computed again until one of these changes. Every opening sets the mark's own mtime to the
        current time. A symbolic link raises OSError.
        """
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != size:
                raise Damaged("is empty" if not status.st_size else f"has {status.st_size} of {size} bytes")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        state = [status.st_size, status.st_mtime_ns, status.st_ino, digest]
        if self._marks.get(key) != state and self._read_mark(key) != state:
            if digest_of(mapped) != digest:
                raise Damaged("differs from its digest in the manifest")
            self._write_mark(key, state)
        self._marks[key] = state
        with suppress(OSError):
            os.utime(self._mark_file(key))
        return mapped

    def forget(self, path: Path, key: str) -> None:
        """Delete the file at `path`, and the mark for `key`."""
        path.unlink(missing_ok=True)
        self._mark_file(key).unlink(missing_ok=True)

    @contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """Hold the lock for fetching file `key`; raise StorageError if another process keeps the lock for `seconds`."""
        with _hold_lock(self.root / ".locks" / key, seconds):
            yield

    @contextmanager
    def staging(self, key: str, size: int | None = None) -> Iterator[Path]:
        """Yield an empty temporary folder for the download of file `key`, and remove the folder when the block ends.

        The caller must hold the file's lock. If `size` is given and the cache has a limit, `size` bytes of the limit
        are reserved for this file, and other files are evicted to make room.
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

        Reservations of other processes can leave too little room even in an empty cache. This process then waits until
        they are released. Raises StorageError after the total time of the retry policy.
        """
        patience = self.options.patience.total(size)
        end = time.monotonic() + patience
        while True:
            with _hold_lock(self.options.folder / ".lock", patience):
                if make_room(self.options, size):
                    (folder / ".reserved").write_text(str(size))
                    return
            if time.monotonic() > end:
                raise StorageError(
                    f"can't be cached: {self.options.folder} with {self.options.limit} bytes is full of shards that "
                    f"other processes are fetching, and has no room for {size} bytes; raise data.cache_limit"
                )
            time.sleep(_POLL_S)

    def _mark_file(self, key: str) -> Path:
        return self.root / ".verified" / key

    def _read_mark(self, key: str) -> object:
        try:
            return json.loads(self._mark_file(key).read_bytes())
        except (OSError, ValueError):
            return None

    def _write_mark(self, key: str, state: list[int | str]) -> None:
        mark = self._mark_file(key)
        temporary = mark.with_name(f".{mark.name}.{secrets.token_hex(4)}")
        with suppress(OSError):  # a mark that can't be written is no error: then every process verifies the file
            mark.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(state))
            temporary.replace(mark)


def make_room(options: CacheOptions, size: int) -> bool:
    """Evict the least recently used files until `size` more bytes fit below the limit; return True if they fit.

    Bytes that other processes have reserved count as used. If `size` bytes would not fit even in a cache without
    files, no file is evicted. The caller must hold the cache's lock. A process that has mapped an evicted file can
    still read the file.
    """
    assert options.limit is not None
    # Reservations are counted before files. A file that is completed in between is then counted twice; in the other
    # order it would not be counted at all.
    reserved = _reserved_bytes(options.folder)
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
    """Yield (time of last use, size in bytes, path, the mark's path) for every file with a mark."""
    for entry in _entries(folder):
        for mark in _files(entry / ".verified"):
            file = entry / mark.relative_to(entry / ".verified")
            with suppress(FileNotFoundError):  # the file is on a local disk outside the cache, or was just evicted
                yield mark.stat().st_mtime_ns, file.lstat().st_size, file, mark


def _reserved_bytes(folder: Path) -> int:
    """Return the sum of all processes' reservations, in bytes.

    A process that fetches a file holds the file's lock until it has removed its reservation. If no process holds the
    lock, the process was killed, and its reservation is removed here together with its temporary folder.
    """
    total = 0
    for entry in _entries(folder):
        for reserved in [file for file in _files(entry / ".staging") if file.name == ".reserved"]:
            lock = entry / ".locks" / reserved.parent.relative_to(entry / ".staging")
            try:
                with _hold_lock(lock, 0):
                    shutil.rmtree(reserved.parent, ignore_errors=True)
            except StorageError:
                with suppress(OSError, ValueError):
                    total += int(reserved.read_text())
    return total


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if len(path.name) == _ENTRY_NAME_LENGTH]


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder.

    Other processes may remove folders at the same time. os.walk skips removed folders; Path.rglob would raise an error.
    """
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


@contextmanager
def _hold_lock(file: Path, seconds: float) -> Iterator[None]:
    """Lock a lock file inside the block; raise StorageError if another process keeps the lock for `seconds`.

    The lock file is never removed. Otherwise one process could hold the removed file's lock while another process locks
    a new file at the same path.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + seconds
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= end:
                raise StorageError(
                    f"is locked: another process has held {file} for {seconds:.0f} seconds; end that process if it "
                    "hangs"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _try_lock(descriptor: int) -> bool:
    """Try to take a lock without waiting; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
