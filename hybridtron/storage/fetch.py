"""Bringing files into the cache: fetched, unpacked and verified in bounded time, and only then given their names."""

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
    """A file of the cache, and how it gets there.

    key, stored: its name below the cache's entry, and below the remote place
    size: the bytes that are moved for it, which say how long that may take
    opened: what is made of it, or Damaged
    unpacked: its bytes from the file that was stored, where that is another; Damaged too
    """

    key: str
    stored: str
    size: int
    opened: Callable[[Path], Opened]
    unpacked: Callable[[Path], bytes] | None = None

    def ready(self, remote: Remote, folder: Path) -> tuple[Path, Opened]:
        """Where the file stands, verified, inside a folder that nobody else looks at; one attempt."""
        into = folder / secrets.token_hex(8) / "file"
        brought = remote.bring(self.stored, into.with_name("stored") if self.unpacked else into)
        if self.unpacked is not None:
            data = self.unpacked(brought)
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_bytes(data)
        return into, self.opened(into)


def fetched(
    entry: CacheEntry, remote: Remote, wanted: Wanted[Opened], evictable: bool = True, again: bool = False
) -> Opened:
    """What `wanted.opened` makes of a file of the cache, which is fetched where it is absent or damaged, or again.

    `evictable` files count for the cache's limit. A fault leaves the cache without the file, never with a wrong one.
    """
    options, size = entry.options, wanted.size

    def attempt() -> tuple[Path, Opened]:
        with disk_advice(options, size):
            return wanted.ready(remote, staging)

    try:
        # Who holds the lock may first wait for room, then fetch.
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
                ready.replace(inside(entry.root, wanted.key))  # a mark stays true under the file's new name
            return opened
    except OSError as error:
        raise StorageError(f"can't be brought into the cache {options.folder}: {error}") from error
