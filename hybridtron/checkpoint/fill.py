"""Filling tensors from the chunks that hold them: bytes are read once, digested and copied while they are in the cache.

Chunks of the same rows, by ranks that had some columns each, are read side by side, some rows at a time. So rows are
whole when they leave the cache: one chunk after another, memory is written in short pieces, at half its speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridtron.checkpoint.files import PartReader, dtype_of, row_copier
from hybridtron.checkpoint.manifest import File, StoredShard

AT_ONCE = 2**19  # bytes of the rows that are read together: with as many of the tensor they fit into a core's cache


class Target(NamedTuple):
    """A rectangle of a whole tensor: what its entries are read into, and where the first of them lies."""

    into: Tensor
    offset: Sequence[int]


class Share(NamedTuple):
    """What a chunk holds of rectangles, in the whole tensor's places."""

    chunk: StoredShard
    runs: Sequence[tuple[Target, Sequence[range]]]


class Move(NamedTuple):
    """Rows of a chunk, where they go in a rectangle, and what copies the columns that both have."""

    rows: range
    to: int
    copy: Callable[[slice, slice], object]


def fill(folder: Path, chunks: Sequence[StoredShard], files: Mapping[str, File], wanted: Sequence[Target]) -> int:
    """Read what chunks of a tensor hold of rectangles of it, which do not overlap; how many entries that were.

    Raises BrokenCheckpoint where a chunk is not as it was written; what was read by then is worth nothing.
    """
    if not chunks[0].shape:  # a number is a row
        chunks = [chunk._replace(offset=(0,), size=(1,)) for chunk in chunks]
        wanted = [Target(one.into.reshape(1), (0,)) for one in wanted]
    shares = [share for chunk in chunks if (share := _share(chunk, wanted)).runs]
    for _, of_rows in itertools.groupby(sorted(shares, key=_rows), _rows):
        _read_side_by_side(folder, files, list(of_rows))
    return sum(math.prod(map(len, runs)) for share in shares for _, runs in share.runs)


def _read_side_by_side(folder: Path, files: Mapping[str, File], shares: Sequence[Share]) -> None:
    """Read chunks of the same rows."""
    rows, together = shares[0].chunk.size[0], sum(_row_bytes(folder, share.chunk) for share in shares)
    count = min(rows, max(1, AT_ONCE // together))
    with ExitStack() as files_open:
        readers = [_ChunkReader(folder, share, files[share.chunk.file], count) for share in shares]
        for reader in readers:
            files_open.enter_context(reader.part)
        for first, reader in itertools.product(range(0, rows, count), readers):
            reader.take(range(first, min(first + count, rows)))
        for reader in readers:
            reader.part.verify(reader.chunk.digest)


class _ChunkReader:
    """Reads a chunk from its first row to its last, some at a time, and copies what is wanted of it to its places."""

    def __init__(self, folder: Path, share: Share, file: File, count: int) -> None:
        chunk = share.chunk
        dtype, self.chunk, self._row_bytes = dtype_of(folder, chunk), chunk, _row_bytes(folder, chunk)
        self.part = PartReader(folder / chunk.file, chunk.start, chunk.size[0] * self._row_bytes, file.size)
        self._bytes = np.empty(count * self._row_bytes, dtype=np.uint8)
        stored = torch.from_numpy(self._bytes).view(dtype).view(count, *chunk.size[1:])
        self._moves = [self._move(stored, one, runs) for one, runs in share.runs]

    def _move(self, stored: Tensor, wanted: Target, runs: Sequence[range]) -> Move:
        theirs, ours = (
            tuple(slice(run.start - first, run.stop - first) for run, first in zip(runs, offset, strict=True))
            for offset in (self.chunk.offset, wanted.offset)
        )
        copy = row_copier(stored[:, *theirs[1:]], wanted.into[:, *ours[1:]])
        return Move(range(theirs[0].start, theirs[0].stop), ours[0].start, copy)

    def take(self, rows: range) -> None:
        """The next rows of the chunk."""
        self.part.read_into(self._bytes[: len(rows) * self._row_bytes].data)
        for move in self._moves:
            first, end = max(rows.start, move.rows.start), min(rows.stop, move.rows.stop)
            if first < end:
                to = move.to + first - move.rows.start
                move.copy(slice(first - rows.start, end - rows.start), slice(to, to + end - first))


def _rows(share: Share) -> tuple[int, int]:
    return share.chunk.offset[0], share.chunk.size[0]


def _row_bytes(folder: Path, chunk: StoredShard) -> int:
    return math.prod(chunk.size[1:]) * dtype_of(folder, chunk).itemsize


def _share(chunk: StoredShard, wanted: Sequence[Target]) -> Share:
    found = []
    for one in wanted:
        axes = zip(chunk.offset, chunk.size, one.offset, one.into.shape, strict=True)
        runs = [range(max(a, b), min(a + m, b + n)) for a, m, b, n in axes]
        if all(runs):
            found.append((one, runs))
    return Share(chunk, found)
