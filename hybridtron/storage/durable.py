"""Durable writes: when a write has returned, its bytes are flushed to disk and survive a crash of the machine."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hybridtron.own_folders import sync

FLUSH_BYTES = 2**24  # a flush begins when this many bytes were written since the last flush began


@contextmanager
def writing(path: Path, start: int | None = None) -> Iterator[Callable[[memoryview], None]]:
    """Open a file, and yield a function that writes consecutive bytes to it.

    Without `start` the file is new. With `start` it may exist: bytes are written from this position on, and all other
    bytes in the file stay, since other processes may write them at the same time.

    While further bytes are written, a thread flushes earlier bytes to disk (fsync). When the block ends without an
    error, all bytes are on disk.
    """
    size = 0  # bytes written so far
    size_at_flush = 0  # bytes written when the last flush began
    flush = Future[None]()
    flush.set_result(None)
    with _opened(path, start) as file, ThreadPoolExecutor(1, "flushing") as thread:

        def write(data: memoryview) -> None:
            nonlocal size, size_at_flush, flush
            size += len(data)
            while data:
                data = data[file.write(data) :]
            if size - size_at_flush >= FLUSH_BYTES and flush.done():
                flush.result()  # raises an error of the last fsync, which a later fsync would not report again
                size_at_flush = size
                flush = thread.submit(os.fsync, file.fileno())

        yield write
        flush.result()
        os.fsync(file.fileno())


def _opened(path: Path, start: int | None) -> io.FileIO:
    """Open a new file for writing; with `start`, open a file at this position and keep its bytes."""
    if start is None:
        return path.open("wb", buffering=0)
    file = io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb")
    file.seek(start)
    return file


def temporary_of(path: Path) -> Path:
    """Return the temporary path under which a file or folder is written, before it is renamed to `path`.

    If the process is killed, the incomplete file stays under the temporary path.
    """
    return path.with_name(f".{path.name}.temporary")


def put(path: Path, content: bytes) -> None:
    """Write a file atomically and durably. A process that reads the file sees either the old or the new content."""
    temporary = temporary_of(path)
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
