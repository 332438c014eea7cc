"""Rectangles that locate a rank's tensor shards in the full tensors, as megatron-core's `ShardedTensor`.

A checkpoint consists of such blocks, so any layout can write it and any other can read it. A fused weight has one key
for each of its parts. The flat shard that the distributed optimizer keeps of a weight becomes a few rectangles: the
end of one row, full rows, the start of another row. A block is a view, so reading into it fills the tensor itself.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from hybridtron.architecture.base import Cut, Parameter, StatePart
from hybridtron.parallel.cut import held_runs
from hybridtron.parallel.mesh import Mesh, RankGroup


class Rectangle(NamedTuple):
    """Rectangular part of a tensor: the offset of its first entry, and its data."""

    offset: tuple[int, ...]
    data: Tensor


def block(key: str, shape: tuple[int, ...], offset: tuple[int, ...], data: Tensor, main: bool) -> ShardedTensor:
    """Return data as the block at `offset` of a full tensor with this shape; only the `main` copy is written."""
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), shape, offset, None, replica_id=0 if main else 1)


def weight_blocks(
    name: str, rectangles: Iterable[Rectangle], parameter: Parameter, mesh: Mesh, main: bool = True
) -> list[ShardedTensor]:
    """Return the blocks for a weight, or an equally large tensor, from rectangles of this rank's shard.

    `main` is True on the one rank that writes these blocks, among all ranks that hold them.
    """
    for cut in parameter.active_cuts(mesh.sizes):
        runs = held_runs(parameter, cut, mesh.dimensions[cut.over])
        rectangles = [full for rectangle in rectangles for full in _in_full(rectangle, cut.axis, runs)]
    rectangles = list(rectangles)
    axis = parameter.parts_axis
    blocks = []
    start = 0
    for key, shape in parameter.stored(name).items():
        entries = range(start, start + shape[axis])
        inside = [in_part for rectangle in rectangles for in_part in _within(rectangle, axis, entries)]
        blocks += [block(key, shape, offset, data, main) for offset, data in inside]
        start += shape[axis]
    return blocks


def lane_blocks(key: str, held: Tensor, part: StatePart, lanes: range, total: int, mesh: Mesh) -> list[ShardedTensor]:
    """Return the blocks for one state part of this rank's lanes, out of `total` lanes."""
    shape = [total, *held.shape[1:]]
    cuts = part.active_cuts(mesh.sizes)
    first = all(ranks.rank == 0 for ranks in mesh.uncut(cuts))
    rectangles = [(Rectangle((lanes.start, *[0] * (held.dim() - 1)), held), first)]
    for cut in cuts:
        axis = 1 + cut.axis  # axis 0 is the lane
        shape[axis] = sum(part.fused_sizes(cut.axis))
        runs = list(_written_runs(part, cut, mesh.dimensions[cut.over]))
        rectangles = [
            (full, main and new)
            for rectangle, main in rectangles
            for full, (_, new) in zip(_in_full(rectangle, axis, [run for run, _ in runs]), runs, strict=True)
        ]
    return [block(key, tuple(shape), *rectangle, main) for rectangle, main in rectangles]


def _written_runs(part: StatePart, over: Cut, ranks: RankGroup) -> Iterator[tuple[range, bool]]:
    """Yield the runs that a rank holds, in its own order, and whether it writes them.

    An entry that several ranks hold is written by the first.
    """
    before = (held_runs(part, over, RankGroup(ranks.size, rank)) for rank in range(ranks.rank))
    written = {entry for runs in before for run in runs for entry in run}
    for run in held_runs(part, over, ranks):
        for again, entries in itertools.groupby(run, written.__contains__):
            first, *rest = entries
            yield range(first, first + 1 + len(rest)), not again
        written.update(run)


def writes(name: str, mesh: Mesh, cuts: Sequence[Cut], copied: bool = True) -> bool:
    """Return True on the one rank that writes this tensor, among all its holders.

    A hash of the name picks the rank, so that names are spread evenly over the holders. Without `copied`, the mesh's
    copies hold different entries of the tensor, and each writes its own.
    """
    holders = 1
    own_number = 0
    for ranks in [*mesh.uncut(cuts), *([mesh.copies] if copied else [])]:
        own_number += holders * ranks.rank
        holders *= ranks.size
    return zlib.crc32(name.encode()) % holders == own_number


def full_rectangle(tensor: Tensor) -> Rectangle:
    """Return a full tensor as one rectangle."""
    return Rectangle((0,) * tensor.dim(), tensor)


def flat_rectangles(flat: Tensor, start: int, shape: Sequence[int]) -> Iterator[Rectangle]:
    """Yield the entries of a flattened tensor from `start` on, as rectangles of the original shape."""
    if len(shape) == 1:
        yield Rectangle((start,), flat)
        return
    row = math.prod(shape[1:])
    at = 0
    while at < len(flat):
        index, inside = divmod(start + at, row)
        if inside or len(flat) - at < row:
            count = min(row - inside, len(flat) - at)
            for offset, data in flat_rectangles(flat[at : at + count], inside, shape[1:]):
                yield Rectangle((index, *offset), data.unsqueeze(0))
        else:
            count = (len(flat) - at) // row * row
            yield Rectangle((index, *[0] * (len(shape) - 1)), flat[at : at + count].view(-1, *shape[1:]))
        at += count


def _in_full(rectangle: Rectangle, axis: int, runs: Sequence[range]) -> Iterator[Rectangle]:
    """Yield a rectangle of a rank's shard as rectangles of the full tensor, at their global offsets.

    `runs` are the ranges of `axis` that the shard holds. It stores them side by side: run k begins where run k - 1
    ends. A rectangle that crosses from one run to the next becomes several rectangles of the full tensor.
    """
    at = 0
    for run in runs:
        if (overlap := _overlap(rectangle, axis, range(at, at + len(run)))) is not None:
            yield _moved(overlap, axis, run.start - at)
        at += len(run)


def _within(rectangle: Rectangle, axis: int, entries: range) -> Iterator[Rectangle]:
    """Yield the part of a rectangle that lies in these entries of an axis, with offsets from the first of them."""
    if (overlap := _overlap(rectangle, axis, entries)) is not None:
        yield _moved(overlap, axis, -entries.start)


def _overlap(rectangle: Rectangle, axis: int, entries: range) -> Rectangle | None:
    """Return the part of a rectangle that lies in a range of one axis, or None if they do not overlap."""
    first = rectangle.offset[axis]
    low = max(first, entries.start)
    high = min(first + rectangle.data.shape[axis], entries.stop)
    if low >= high:
        return None
    return _moved(Rectangle(rectangle.offset, rectangle.data.narrow(axis, low - first, high - low)), axis, low - first)


def _moved(rectangle: Rectangle, axis: int, by: int) -> Rectangle:
    """Return a rectangle with its offset along one axis shifted."""
    offset = list(rectangle.offset)
    offset[axis] += by
    return Rectangle(tuple(offset), rectangle.data)
