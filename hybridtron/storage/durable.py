"""Writing so that it is on disk when this returns, whatever happens to the machine then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hybridtron.own_folders import sync

EARLY = 2**24  # bytes that are worth a flush of their own


@contextmanager
def writing(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """What adds bytes to a new file: the disk takes them while more are written, and has all when the block ends."""
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
                flush.result()  # the disk reports an error once
                begun, flush = size, thread.submit(os.fsync, file.fileno())

        yield write
        flush.result()
        os.fsync(file.fileno())


def temporary_of(path: Path) -> Path:
    """Where a file or a folder stands until it has its name; a process that is killed leaves it there."""
    return path.with_name(f".{path.name}.temporary")


def put(path: Path, stored: bytes) -> None:
    """A file that appears whole, in place of one that may be there, and stays."""
    temporary = temporary_of(path)
    temporary.write_bytes(stored)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
