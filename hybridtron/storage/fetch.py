"""Fetching files into the cache.

Each is fetched, unpacked and verified in bounded time, and only then gets its name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hybridtron.storage.attempts import Damaged, StorageError, attempted
from hybridtron.storage.cache import CacheEntry, disk_advice
from hybridtron.storage.remote import Remote, inside

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Wanted(Generic[Opened]):
    """A file to be cached, and how to obtain it.

    key, stored: its name below the cache's entry, and below the remote folder
    size: bytes to move, for the time limit
    opened: opens the cached file, and raises Damaged if it is not valid
    unpacked: decompresses the stored file, and raises Damaged if it is not valid; None where it is stored uncompressed
    """

    key: str
    stored: str
    size: int
    opened: Callable[[Path], Opened]
    unpacked: Callable[[Path], bytes] | None = None

    def ready(self, remote: Remote, folder: Path) -> tuple[Path, Opened]:
        """Fetch the file once into the temporary `folder` and verify it; return its path and the result of `opened`."""
        unpacked_path = folder / secrets.token_hex(8) / "file"
        brought_path = remote.bring(self.stored, unpacked_path.with_name("stored") if self.unpacked else unpacked_path)
        if self.unpacked is not None:
            data = self.unpacked(brought_path)
            unpacked_path.parent.mkdir(parents=True, exist_ok=True)
            unpacked_path.write_bytes(data)
        return unpacked_path, self.opened(unpacked_path)


def fetched(
    entry: CacheEntry, remote: Remote, wanted: Wanted[Opened], evictable: bool = True, again: bool = False
) -> Opened:
    """Return `wanted.opened` of a cached file. The file is fetched if it is absent or damaged, or if `again` is set.

    Files that are `evictable` count against the cache's limit. A failure raises StorageError, and never leaves a
    damaged file in the cache.
    """
    options = entry.options
    size = wanted.size

    def attempt() -> tuple[Path, Opened]:
        with disk_advice(options, size):
            return wanted.ready(remote, staging)

    try:
        # Twice the time, because the holder of the lock may first wait for room and then fetch.
        with disk_advice(options, size), entry.lock(wanted.key, 2 * options.patience.total(size)):
            path = inside(entry.root, wanted.key)
            if not again:
                try:
                    return wanted.opened(path)
                except (FileNotFoundError, Damaged):
                    entry.forget(path, wanted.key)
            with entry.staging(wanted.key, size if evictable else None) as staging:
                ready, opened = attempted(remote.patience, size, "fetched", attempt)
                path.parent.mkdir(parents=True, exist_ok=True)
                ready.replace(inside(entry.root, wanted.key))  # renaming keeps inode and mtime, so the mark stays valid
            return opened
    except OSError as error:
        raise StorageError(f"can't be brought into the cache {options.folder}: {error}") from error
