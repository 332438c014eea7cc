"""Durable writes: data is on disk when a function returns, and survives a crash of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hybridtron.own_folders import sync

EARLY = 2**24  # bytes written since the last flush that start another one


@contextmanager
def writing(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """Open a new file, and yield a function that appends bytes to it.

    A thread flushes written bytes to disk while more are written. All bytes are on disk when the block ends.
    """
    size = begun = 0
    flush = Future[None]()
    flush.set_result(None)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "flushing") as thread:

        def write(stored: memoryview) -> None:
            nonlocal size, begun, flush
            size += len(stored)
            while stored:
                stored = stored[file.write(stored) :]
            if size - begun >= EARLY and flush.done():
                flush.result()  # raises the flush's error, which the disk reports only once
                begun, flush = size, thread.submit(os.fsync, file.fileno())

        yield write
        flush.result()
        os.fsync(file.fileno())


def temporary_of(path: Path) -> Path:
    """Return the temporary path of a file or folder. A killed process leaves it behind."""
    return path.with_name(f".{path.name}.temporary")


def put(path: Path, stored: bytes) -> None:
    """Write a file atomically and durably. A reader sees the old content or the new, never a part."""
    temporary = temporary_of(path)
    temporary.write_bytes(stored)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
