"""Owners of full matrices: ranks that compute update directions from full matrices, for an optimizer such as Muon.

Each rank updates some entries of each weight: a range in its tensor-parallel shard, flattened. An optimizer such as
Muon needs full matrices. So every matrix in a pipeline stage has an owner among the stage's ranks. The ranks send their
entries to the owner, the owner computes the matrix's direction, and sends each rank the direction of the rank's
entries. A weight that is fused from several matrices has an owner for each matrix. If the optimizer takes the heads of
a projection separately, the owner of the matrix processes all of its heads. Small matrices of consecutive experts have
one owner, which processes them as a batch; the sizes of batches depend on nothing but the experts' size.

A matrix's cost is the cost of its product with itself: m n min(m, n) for m rows and n columns, summed over a batch. To
balance the owners, the matrices are distributed in decreasing order of cost, each to the rank with the smallest sum so
far. Every matrix is processed by one rank in full, so the result's bits do not depend on the number of ranks.

The exchange takes several rounds, which limits the memory for its buffers, and lets transfers overlap with computation:

    before round k is processed     the entries of round k + 1 are sent
    while round k is processed      they travel, as do the directions of round k - 1
    after round k is processed      its directions are sent, and those of round k - 1 are applied

So the ranks wait for the slowest rank of a round only at the end of the next round, and owners are balanced by the sum
of costs over all rounds so far. All ranks compute the owners, and which entries other ranks send, from the parameter
table and from the layout, without communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.parallel.blocks import Rectangle, flat_rectangles, weight_blocks, writes
from hybridtron.parallel.mesh import Mesh, RankGroup

ENTRIES_OF_RANK = 2**25
"""Largest number of entries that a rank updates in a round, on average over ranks.

A weight with more entries is alone in a round. The owners also hold their matrices in full. There are buffers of up to
three successive rounds at a time.
"""


ENTRIES_TOGETHER = 2**24
"""Largest number of entries in a batch of experts' matrices. A larger matrix is alone in a batch."""


@dataclass(frozen=True)
class DividedWeight:
    """A weight whose entries are divided among the ranks of a pipeline stage.

    name, parameter: the weight's name, and its entry in the parameter table
    mesh: the ranks that shard and replicate the weight
    ranges: for each rank in `mesh.copies`, the range in the flattened shard that the rank updates
    everywhere: True if each of these ranks updates the full shard
    by_head: True if the heads of a projection are processed separately
    """

    name: str
    parameter: Parameter
    mesh: Mesh
    ranges: Sequence[range]
    everywhere: bool
    by_head: bool = False

    def in_shards(self) -> DividedWeight:
        """Return this tensor-parallel rank's shard as a weight of its own, divided among the ranks in `mesh.copies`."""
        shape = list(self.parameter.shape)
        parts = self.parameter.parts
        heads = self.parameter.heads
        for cut in self.parameter.active_cuts(self.mesh.sizes):
            ranks = self.mesh.dimensions[cut.over]
            shape[cut.axis] = ranks.share(shape[cut.axis])
            if cut.axis == self.parameter.parts_axis:
                parts = tuple((name, ranks.share(size)) for name, size in parts)
                heads = tuple(ranks.share(count) if count > 1 else 1 for count in heads)
        shard = replace(self.parameter, shape=tuple(shape), parts=parts, heads=heads, cuts=())
        return replace(self, parameter=shard, mesh=Mesh({}, self.mesh.copies))

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fused matrices, by their names in a checkpoint.

        With `by_head`, the shape of a matrix with several heads is (heads, rows of a head, columns). The shape of a
        batch of experts is (experts, rows, columns); the batch's name ends with the number of its first expert.
        """
        shapes = self.parameter.stored(self.name)
        if self.parameter.stacked:
            return {
                f"{key}.{first}": (min(self.experts_together, count - first), rows, columns)
                for key, (count, rows, columns) in shapes.items()
                for first in range(0, count, self.experts_together)
            }
        if not self.by_head:
            return shapes
        heads = self.parameter.stored_heads(self.name)
        return {
            key: (heads[key], rows // heads[key], columns) if heads[key] > 1 else (rows, columns)
            for key, (rows, columns) in shapes.items()
        }

    @property
    def experts_together(self) -> int:
        """Number of experts in a batch, if the weight has a matrix for each expert."""
        entries = max(math.prod(shape[1:]) for shape in self.parameter.stored(self.name).values())
        return max(1, ENTRIES_TOGETHER // entries)

    @property
    def entries_of_rank(self) -> float:
        """Number of entries that a rank updates, on average over the ranks in `mesh.copies`."""
        shard = math.prod(self.parameter.shard_shape(self.mesh.sizes))
        if self.everywhere:
            return shard
        return shard / self.mesh.copies.size


class Piece(NamedTuple):
    """Rectangle of a matrix, or of a batch of experts, as a view of the entries that a rank updates.

    matrix: the matrix's name
    index: the rectangle's position in the matrix; in a batch of experts it has three axes
    shape, stride, start: the view of the rank's flat entries
    sent: True if this rank sends the rectangle to the owner; other ranks may hold the same entries
    """

    matrix: str
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    sent: bool

    def view(self, flat: Tensor) -> Tensor:
        """Return the rectangle as a view of a rank's flat entries."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def pieces_of(weight: DividedWeight, rank: int) -> Iterator[Piece]:
    """Yield the rectangles of matrices that a rank updates; `rank` is its index among the stage's ranks."""
    mesh = weight.mesh.at(rank)
    held = weight.ranges[mesh.copies.rank]
    parameter = weight.parameter
    sent = writes(weight.name, mesh, parameter.active_cuts(mesh.sizes), copied=weight.everywhere)
    flat = torch.empty(len(held), device="meta")
    rectangles = flat_rectangles(flat, held.start, parameter.shard_shape(mesh.sizes))
    for block in weight_blocks(weight.name, rectangles, parameter, mesh):
        assert block.data is not None
        whole = Rectangle(block.global_offset, block.data)
        if parameter.stacked:
            in_batches = list(_batches(block.key, whole, weight.experts_together))
        else:
            in_batches = [(block.key, whole)]
        for matrix, (offset, data) in in_batches:
            index = tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))
            yield Piece(matrix, index, tuple(data.shape), data.stride(), int(data.storage_offset()), sent)


def _batches(key: str, rectangle: Rectangle, together: int) -> Iterator[tuple[str, Rectangle]]:
    """Divide a rectangle of several experts among batches; yield (the batch's name, the rectangle in the batch)."""
    first = rectangle.offset[0]
    last = first + rectangle.data.shape[0]
    for start in range(first - first % together, last, together):
        low = max(first, start)
        high = min(last, start + together)
        data = rectangle.data.narrow(0, low - first, high - low)
        yield f"{key}.{start}", Rectangle((low - start, *rectangle.offset[1:]), data)


def balanced_owners(rounds: Sequence[Mapping[str, tuple[int, ...]]], ranks: int) -> list[dict[str, int]]:
    """Return the matrices' owners for each round; up to each round, the ranks' sums of costs are about equal.

    rounds: in each round, the shapes of the matrices by name
    """
    loads = [0] * ranks
    owners_of_rounds = []
    for shapes in rounds:
        owners = {}
        for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), name)):
            owner = loads.index(min(loads))
            owners[name] = owner
            loads[owner] += cost(shapes[name])
        owners_of_rounds.append(owners)
    return owners_of_rounds


def cost(shape: tuple[int, ...]) -> int:
    """Return the number of multiplications in a product of a matrix with itself: m n min(m, n), for each head."""
    return math.prod(shape) * min(shape[-2:])


class Transfer:
    """An all-to-all exchange of rectangles that overlaps with computation, from its start until `received`.

    ranks: the ranks that take part
    sent: for each rank, the tensors that this rank sends
    expected: for each rank, the rectangles that this rank receives
    empty: tensor without entries, with the dtype and the device of the tensors
    """

    def __init__(
        self,
        ranks: RankGroup,
        sent: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[Piece]],
        empty: Tensor,
    ) -> None:
        self._pieces = [piece for pieces in expected for piece in pieces]
        self._handle: Any = None
        if ranks.size == 1:  # a single rank receives its own tensors, without a copy
            self._sent = sent[0]
            return
        self._outgoing = torch.cat([empty, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
        sizes_in = [sum(piece.size for piece in pieces) for pieces in expected]
        sizes_out = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        self._incoming = empty.new_empty(sum(sizes_in))
        self._handle = dist.all_to_all_single(
            self._incoming, self._outgoing, sizes_in, sizes_out, group=ranks.group, async_op=True
        )

    def received(self) -> Iterator[tuple[Piece, Tensor]]:
        """Wait for the transfer's end, and yield the rectangles that this rank receives, in the order of `expected`."""
        if self._handle is None:
            yield from zip(self._pieces, self._sent, strict=True)
            return
        self._handle.wait()
        at = 0
        for piece in self._pieces:
            yield piece, self._incoming[at : at + piece.size].view(piece.shape)
            at += piece.size


class Exchange:
    """One round: the ranks send the entries of some matrices to the owners, and receive the directions.

    weights: the weights in the round
    owners: a rank for each matrix
    ranks: the ranks that take part
    """

    def __init__(self, weights: Sequence[DividedWeight], owners: Mapping[str, int], ranks: RankGroup) -> None:
        self.names = [weight.name for weight in weights]
        self.ranks = ranks
        self.shapes = {name: shape for weight in weights for name, shape in weight.matrices.items()}
        own_pieces = [(weight.name, piece) for weight in weights for piece in pieces_of(weight, ranks.rank)]
        # for each rank r, this rank's rectangles in the matrices that r owns, as (weight's name, rectangle)
        self.held = [[pair for pair in own_pieces if owners[pair[1].matrix] == r] for r in range(ranks.size)]
        owned_weights = [w for w in weights if any(owners[name] == ranks.rank for name in w.matrices)]
        # for each rank r, the rectangles that r holds in the matrices that this rank owns
        self.owned = [
            [piece for w in owned_weights for piece in pieces_of(w, r) if owners[piece.matrix] == ranks.rank]
            for r in range(ranks.size)
        ]

    def send(self, updates: Mapping[str, Tensor], empty: Tensor) -> Transfer:
        """Start to send this rank's entries to the owners.

        updates: this rank's flat entries of each weight; a weight without entries may be missing
        empty: tensor without entries, with the dtype and the device of the updates
        """
        sent = [[piece.view(updates[name]) for name, piece in held if piece.sent] for held in self.held]
        return Transfer(self.ranks, sent, [[piece for piece in owned if piece.sent] for owned in self.owned], empty)

    def process(self, arriving: Transfer, direction_of: Callable[[Tensor], Tensor], empty: Tensor) -> Transfer:
        """Compute the directions of the matrices that this rank owns, and start to return them.

        arriving: the entries of these matrices, from all ranks
        direction_of: function from a full matrix, or a batch of heads or experts, to its direction
        """
        matrices: dict[str, Tensor] = {}
        for piece, entries in arriving.received():
            shape = self.shapes[piece.matrix]
            if piece.size == math.prod(shape):
                matrices[piece.matrix] = entries
                continue
            if piece.matrix not in matrices:
                if len(piece.index) == 2:  # the heads of a matrix are consecutive rows
                    shape = (math.prod(shape[:-1]), shape[-1])
                matrices[piece.matrix] = empty.new_empty(shape)
            matrices[piece.matrix][piece.index] = entries
        for name, matrix in matrices.items():
            matrices[name] = direction_of(matrix.reshape(self.shapes[name])).reshape(matrix.shape)
        returned = [[matrices[piece.matrix][piece.index] for piece in owned] for owned in self.owned]
        return Transfer(self.ranks, returned, [[piece for _, piece in held] for held in self.held], empty)

    def directions(self, returning: Transfer) -> Iterator[tuple[str, Piece, Tensor]]:
        """Yield the directions of this rank's entries: (the weight's name, the rectangle, its direction)."""
        names = [name for held in self.held for name, _ in held]
        for name, (piece, entries) in zip(names, returning.received(), strict=True):
            yield name, piece, entries


def overlapped(
    rounds: Sequence[Exchange],
    updates_of: Callable[[Exchange], Mapping[str, Tensor]],
    direction_of: Callable[[Tensor], Tensor],
    empty: Tensor,
) -> Iterator[tuple[Exchange, Transfer]]:
    """Process all rounds, and yield (round, the transfer of its directions) after the next round was processed.

    So while a round is processed, the directions of the round before it and the entries of the round after it travel.

    updates_of: function from a round to this rank's flat entries of each of its weights
    """
    arriving = [one_round.send(updates_of(one_round), empty) for one_round in rounds[:1]]
    returning: list[tuple[Exchange, Transfer]] = []
    for index, one_round in enumerate(rounds):
        arriving += [later.send(updates_of(later), empty) for later in rounds[index + 1 : index + 2]]
        returning.append((one_round, one_round.process(arriving.pop(0), direction_of, empty)))
        if len(returning) == 2:
            yield returning.pop(0)
    yield from returning


def interleaved(weights: Sequence[DividedWeight]) -> list[DividedWeight]:
    """Return the weights in an order in which different ranks update successive weights.

    The distributed optimizer may give a rank all entries of successive layers. In the layers' order, one rank would
    hold all entries in a round.
    """
    weights_of: dict[int, list[DividedWeight]] = {}
    for weight in weights:
        lengths = [len(entries) for entries in weight.ranges]
        weights_of.setdefault(lengths.index(max(lengths)), []).append(weight)
    turns = itertools.zip_longest(*weights_of.values())
    return [weight for turn in turns for weight in turn if weight is not None]


def exchanges(
    weights: Sequence[DividedWeight], ranks: RankGroup, entries_of_rank: int = ENTRIES_OF_RANK
) -> list[Exchange]:
    """Divide the weights into rounds; `ranks` are all ranks among which the weights are divided."""
    assert all(weight.mesh.at(ranks.rank) == weight.mesh.without_groups() for weight in weights)
    rounds: list[list[DividedWeight]] = []
    size = 0.0
    for weight in interleaved(weights):
        if not rounds or size + weight.entries_of_rank > entries_of_rank:
            rounds.append([])
            size = 0.0
        rounds[-1].append(weight)
        size += weight.entries_of_rank
    shapes = [{name: shape for weight in in_round for name, shape in weight.matrices.items()} for in_round in rounds]
    owners = balanced_owners(shapes, ranks.size)
    return [Exchange(in_round, owned, ranks) for in_round, owned in zip(rounds, owners, strict=True)]
