"""Where a rank's tensors lie in the whole ones: rectangles with global coordinates, in megatron-core's terms.

A checkpoint is made of such blocks, so that any layout can write it and any other read it. A fused weight has a key for
each of its parts, and the flat shard of a weight that the distributed optimizer keeps is a few rectangles: part of a
row, whole rows, part of a row. A block is a view: what is read into it is in its place.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from hybridtron.architecture.base import Parameter, StatePart
from hybridtron.parallel.cut import held_runs
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup


class Piece(NamedTuple):
    """A rectangle of a tensor: where its first entry lies, and the entries."""

    offset: tuple[int, ...]
    data: Tensor


def block(key: str, shape: tuple[int, ...], offset: tuple[int, ...], data: Tensor, main: bool) -> ShardedTensor:
    """What stands in a whole tensor of this shape from `offset` on; the main copy is the one that is written."""
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), shape, offset, None, replica_id=0 if main else 1)


def weight_blocks(
    name: str, pieces: Iterable[Piece], parameter: Parameter, tensor: TensorGroup, main: bool = True
) -> list[ShardedTensor]:
    """The blocks of what this rank has of a weight, or of something as large, given as pieces of its share.

    `main` says that this rank is the one of all which hold them that writes them.
    """
    axis = parameter.cut_axis(tensor.size)
    runs = [] if axis is None else held_runs(parameter, tensor)
    pieces = [whole for piece in pieces for whole in _in_full(piece, axis, runs)]
    blocks, start = [], 0
    for key, shape in parameter.stored(name).items():
        of_part = range(start, start + shape[0])
        inside = [of_whole for piece in pieces for of_whole in _within(piece, of_part)]
        blocks += [block(key, shape, offset, data, main) for offset, data in inside]
        start += shape[0]
    return blocks


def lane_blocks(
    key: str, held: Tensor, part: StatePart, lanes: range, total: int, groups: Groups
) -> list[ShardedTensor]:
    """The blocks of this rank's share of one part of the states of its lanes, out of `all_lanes`."""
    tensor, axis = groups.tensor, part.cut_axis(groups.tensor.size)
    shape, whole = [total, *held.shape[1:]], Piece((lanes.start, *[0] * (held.dim() - 1)), held)
    if axis is None:
        return [block(key, tuple(shape), *whole, main=tensor.rank == 0)]
    shape[axis + 1] = sum(part.pieces)
    before = (held_runs(part, replace(tensor, rank=rank)) for rank in range(tensor.rank))
    written = {entry for runs in before for run in runs for entry in run}  # by other ranks
    blocks, at = [], 0
    for run in held_runs(part, tensor):
        for again, entries in itertools.groupby(run, written.__contains__):
            first, *others = entries
            count = 1 + len(others)
            offset = (lanes.start, *[0] * axis, first, *[0] * (held.dim() - axis - 2))
            blocks.append(block(key, tuple(shape), offset, held.narrow(axis + 1, at, count), not again))
            at += count
        written.update(run)
    return blocks


def writes(name: str, groups: Groups, copied_over_tensor: bool, copied_over_data: bool) -> bool:
    """Whether this rank is the one, of all that hold a copy, that writes it; names are dealt out over them."""
    copies, own = 1, 0
    for copied, size, rank in (
        (copied_over_tensor, groups.tensor.size, groups.tensor.rank),
        (copied_over_data, groups.data_size, groups.data_rank),
    ):
        if copied:
            own += copies * rank
            copies *= size
    return zlib.crc32(name.encode()) % copies == own


def whole_piece(tensor: Tensor) -> Piece:
    """All of a tensor."""
    return Piece((0,) * tensor.dim(), tensor)


def flat_pieces(flat: Tensor, start: int, shape: Sequence[int]) -> Iterator[Piece]:
    """The entries from `start` on of a tensor that was flattened, as rectangles of it."""
    if len(shape) == 1:
        yield Piece((start,), flat)
        return
    row, at = math.prod(shape[1:]), 0
    while at < len(flat):
        index, inside = divmod(start + at, row)
        if inside or len(flat) - at < row:
            count = min(row - inside, len(flat) - at)
            for offset, data in flat_pieces(flat[at : at + count], inside, shape[1:]):
                yield Piece((index, *offset), data.unsqueeze(0))
        else:
            count = (len(flat) - at) // row * row
            yield Piece((index, *[0] * (len(shape) - 1)), flat[at : at + count].view(-1, *shape[1:]))
        at += count


def _in_full(piece: Piece, axis: int | None, runs: Sequence[range]) -> Iterator[Piece]:
    """A piece of a rank's share, at its offsets in the full tensor, of which the share holds these runs of an axis.

    The share has the runs side by side: run k begins in it where the runs before it end. So a piece of the share that
    crosses from one run to the next is several pieces of the full tensor.
    """
    if axis is None:
        yield piece
        return
    at = 0
    for run in runs:
        if (taken := _overlap(piece, axis, range(at, at + len(run)))) is not None:
            yield _moved(taken, axis, run.start - at)
        at += len(run)


def _within(piece: Piece, rows: range) -> Iterator[Piece]:
    """What of a piece of the full tensor lies in these rows, at its offsets from the first of them."""
    if (taken := _overlap(piece, 0, rows)) is not None:
        yield _moved(taken, 0, -rows.start)


def _overlap(piece: Piece, axis: int, entries: range) -> Piece | None:
    """The part of a piece in a range of one axis."""
    first = piece.offset[axis]
    low, high = max(first, entries.start), min(first + piece.data.shape[axis], entries.stop)
    if low >= high:
        return None
    return _moved(Piece(piece.offset, piece.data.narrow(axis, low - first, high - low)), axis, low - first)


def _moved(piece: Piece, axis: int, by: int) -> Piece:
    offset = list(piece.offset)
    offset[axis] += by
    return Piece(tuple(offset), piece.data)
