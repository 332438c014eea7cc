"""Ways in which a file is damaged by a full disk or a lost node: cut short, or with a page of zeros."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

PAGE = 4096


def put(path: Path, stored: bytes) -> None:
    """A file in place of another one, which this process may have loaded and which must not change under it."""
    path.unlink()
    path.write_bytes(stored)


def truncations(whole: bytes, count: int, seed: int) -> Iterator[bytes]:
    """The file cut at lengths that are drawn; the seed is printed, for the next time."""
    print(f"lengths by seed {seed}")
    draw = random.Random(seed)
    for _ in range(count):
        yield whole[: draw.randrange(len(whole))]


def zeroed_pages(whole: bytes, count: int, seed: int) -> Iterator[bytes]:
    """The file with zeros in place of a page's worth of bytes that were not all zero."""
    print(f"pages by seed {seed}")
    draw = random.Random(seed)
    made = 0
    while made < count:
        first = draw.randrange(len(whole) - PAGE)
        damaged = whole[:first] + bytes(PAGE) + whole[first + PAGE :]
        if damaged != whole:
            made += 1
            yield damaged
