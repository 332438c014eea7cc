"""Download of files into the cache.

A file is fetched, decompressed and verified in a temporary folder, within a time limit. A valid file is then renamed to
its path in the cache.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hybridtron.storage.cache import CacheEntry, disk_advice
from hybridtron.storage.remote import Remote, inside
from hybridtron.storage.retry import Damaged, StorageError, with_retries

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Wanted(Generic[Opened]):
    """A file to be cached, with the functions that decompress and open it.

    key: the file's path in the dataset's folder of the cache
    stored: the file's path in the remote folder
    size: number of bytes to fetch, from which the time limit follows
    opened: function that opens and verifies the cached file; it raises Damaged if the file is not valid
    unpacked: function that decompresses the stored file; it raises Damaged if the file is not valid. None if the file
        is stored uncompressed
    """

    key: str
    stored: str
    size: int
    opened: Callable[[Path], Opened]
    unpacked: Callable[[Path], bytes] | None = None

    def ready(self, remote: Remote, folder: Path) -> tuple[Path, Opened]:
        """Fetch the file into the temporary `folder`, in one attempt; return its path and the result of `opened`."""
        unpacked_path = folder / secrets.token_hex(8) / "file"
        brought_path = remote.bring(self.stored, unpacked_path.with_name("stored") if self.unpacked else unpacked_path)
        if self.unpacked is None and brought_path != unpacked_path:  # a local folder keeps its own file
            unpacked_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(brought_path, unpacked_path)
        if self.unpacked is not None:
            data = self.unpacked(brought_path)
            unpacked_path.parent.mkdir(parents=True, exist_ok=True)
            unpacked_path.write_bytes(data)
        return unpacked_path, self.opened(unpacked_path)


def fetch_file(
    entry: CacheEntry, remote: Remote, wanted: Wanted[Opened], evictable: bool = True, again: bool = False
) -> Opened:
    """Return the result of `wanted.opened` for the file's path in the cache.

    The file is fetched first if it is absent or damaged, or if `again` is set. If `evictable` is set, the file counts
    towards the cache's limit. Raises StorageError if the file can't be fetched; a damaged file is never left in the
    cache.
    """
    options = entry.options
    size = wanted.size

    def attempt() -> tuple[Path, Opened]:
        with disk_advice(options, size):
            return wanted.ready(remote, staging)

    try:
        # Wait twice the total time: the process that holds the lock may first wait for room, and then fetch.
        with disk_advice(options, size), entry.lock(wanted.key, 2 * options.patience.total(size)):
            path = inside(entry.root, wanted.key)
            if not again:
                try:
                    return wanted.opened(path)
                except (FileNotFoundError, Damaged):
                    entry.forget(path, wanted.key)
            with entry.staging(wanted.key, size if evictable else None) as staging:
                ready, opened = with_retries(remote.patience, size, "fetched", attempt)
                path.parent.mkdir(parents=True, exist_ok=True)
                # Renaming keeps inode and mtime, so the mark that `opened` wrote stays valid.
                ready.replace(inside(entry.root, wanted.key))
            return opened
    except OSError as error:
        raise StorageError(f"can't be stored in the cache {options.folder}: {error}") from error
