"""Ways in which a file is damaged by a full disk or a lost node: cut short, or with a page of zeros."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

PAGE = 4096


def put(path: Path, stored: bytes) -> None:
    """Replace a file by a new one. The old file may be loaded in this process, so it must not change in place."""
    path.unlink()
    path.write_bytes(stored)


def truncations(whole: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Cut a file at random lengths; the seed is printed, so that a failure can be repeated."""
    print(f"lengths by seed {seed}")
    draw = random.Random(seed)
    for _ in range(count):
        yield whole[: draw.randrange(len(whole))]


def zeroed_pages(whole: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Overwrite a page of a file with zeros, at random places that were not all zero."""
    print(f"pages by seed {seed}")
    draw = random.Random(seed)
    yielded = 0
    while yielded < count:
        first = draw.randrange(len(whole) - PAGE)
        damaged = whole[:first] + bytes(PAGE) + whole[first + PAGE :]
        if damaged != whole:
            yielded += 1
            yield damaged
