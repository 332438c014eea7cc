"""Blocks: rectangular parts of full tensors, as megatron-core's `ShardedTensor` describes them for a checkpoint.

A block has a key, the full tensor's shape, and the offset at which its data lies in the full tensor. So a checkpoint
that was written in one parallel layout can be read in any other layout. A weight that is fused from several matrices
has a key for each matrix. A shard in the distributed optimizer is a range in a flattened tensor. Such a range becomes a
few rectangles: the end of one row, several full rows, and the beginning of another row. A block's data is a view of the
model's or optimizer's tensor, so loading a checkpoint into the block fills this tensor.
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
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.sharding import held_runs


class Rectangle(NamedTuple):
    """Rectangular part of a tensor."""

    offset: tuple[int, ...]  # index of the part's first element in the tensor
    data: Tensor  # the part's elements


def block(key: str, shape: tuple[int, ...], offset: tuple[int, ...], data: Tensor, main: bool) -> ShardedTensor:
    """Return `data` as the block at `offset` in a full tensor with the shape `shape`.

    If several ranks have this block, only the rank on which `main` is True writes it.
    """
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), shape, offset, None, replica_id=0 if main else 1)


def weight_blocks(
    name: str, rectangles: Iterable[Rectangle], parameter: Parameter, mesh: Mesh, main: bool = True
) -> list[ShardedTensor]:
    """Return the blocks for a weight, or for a tensor of the same shape, such as an optimizer's moment.

    `rectangles` are parts of this rank's shard, with offsets that are counted within the shard. If several ranks have
    the same data, `main` is True on the rank that writes the blocks.
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


def lane_blocks(key: str, states: Tensor, part: StatePart, lanes: range, total: int, mesh: Mesh) -> list[ShardedTensor]:
    """Return the blocks for one tensor in the carried states.

    A lane is a sequence's index in the global batch. A lane's state is carried from step to step. `total` is the number
    of all lanes, and `lanes` has the indices of this rank's lanes. Along axis 0, `states` has the states in this rank's
    lanes. `part` describes the tensor.
    """
    shape = [total, *states.shape[1:]]
    cuts = part.active_cuts(mesh.sizes)
    first = all(ranks.rank == 0 for ranks in mesh.uncut(cuts))
    rectangles = [(Rectangle((lanes.start, *[0] * (states.dim() - 1)), states), first)]
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
    """Yield the runs (index ranges) that a rank's shard holds along the axis of the cut `over`, in the shard's order.

    Each run comes with True if this rank writes it. If several ranks hold an index, the first of them writes it, and
    runs are split where the writing rank changes.
    """
    before = (held_runs(part, over, RankGroup(ranks.size, rank)) for rank in range(ranks.rank))
    written = {entry for runs in before for run in runs for entry in run}
    for run in held_runs(part, over, ranks):
        for again, entries in itertools.groupby(run, written.__contains__):
            first, *rest = entries
            yield range(first, first + 1 + len(rest)), not again
        written.update(run)


def writes(name: str, mesh: Mesh, cuts: Sequence[Cut], copied: bool = True) -> bool:
    """Return True on the rank that writes the tensor called `name`; other ranks may hold the same data.

    A hash of the name picks the rank, so that tensors are spread evenly over the ranks. If `copied` is False,
    each rank in `mesh.copies` holds data of its own, and writes it.
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
    """Yield a range in a flattened tensor as rectangles in the unflattened tensor, which has the shape `shape`.

    `flat` holds consecutive elements; the first has the index `start` in the flattened tensor.
    """
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
    """Translate a rectangle in a rank's shard to rectangles in the full tensor, with global offsets.

    `runs` are the global index ranges that the shard holds along `axis`; the shard is their concatenation. A rectangle
    that overlaps several runs becomes several rectangles in the full tensor.
    """
    at = 0
    for run in runs:
        if (overlap := _overlap(rectangle, axis, range(at, at + len(run)))) is not None:
            yield _moved(overlap, axis, run.start - at)
        at += len(run)


def _within(rectangle: Rectangle, axis: int, entries: range) -> Iterator[Rectangle]:
    """Yield the intersection of a rectangle with an index range on one axis, unless the intersection is empty.

    The intersection's offset on this axis is counted from the range's start.
    """
    if (overlap := _overlap(rectangle, axis, entries)) is not None:
        yield _moved(overlap, axis, -entries.start)


def _overlap(rectangle: Rectangle, axis: int, entries: range) -> Rectangle | None:
    """Return the intersection of a rectangle with an index range on one axis, or None if it is empty."""
    first = rectangle.offset[axis]
    low = max(first, entries.start)
    high = min(first + rectangle.data.shape[axis], entries.stop)
    if low >= high:
        return None
    return _moved(Rectangle(rectangle.offset, rectangle.data.narrow(axis, low - first, high - low)), axis, low - first)


def _moved(rectangle: Rectangle, axis: int, by: int) -> Rectangle:
    """Return a rectangle with its offset on one axis increased by `by`."""
    offset = list(rectangle.offset)
    offset[axis] += by
    return Rectangle(tuple(offset), rectangle.data)
