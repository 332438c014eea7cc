"""A micro-batch as the model reads it: tokens, labels, loss mask, and each token's position and document.

Everything that several layers derive from the batch, such as rotary angles, is computed here once per batch.

`data.documents` decides how a row's documents are treated. With `isolate`, no layer looks across a document boundary.
With `join`, a layer treats each row as one document.

Suffixes of tensor names give the axes: B rows, L tokens in a row, E document boundaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.rope import RopeOptions
from hybridtron.device import copied_to_device
from hybridtron.ops.documents import document_boundaries
from hybridtron.ops.rope import rope_table

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SequenceShard:
    """A context-parallel rank's sequence shard: the same token indices in every row of the batch.

    size, rank: how many shards a row has, and the index of this rank's shard
    spans: for each row, the (begin, end) token indices of its documents in the full row
    length: how many tokens a shard has
    behind_B: for each row, how many tokens before the shard belong to the same document as the shard's first token
    unbroken_B: True for rows in which all tokens in the shard belong to one document
    """

    size: int
    rank: int
    group: Any  # process group of the ranks that divide the rows
    spans: list[list[tuple[int, int]]]
    length: int
    behind_B: Tensor
    unbroken_B: Tensor

    @property
    def first(self) -> int:
        """Index of the shard's first token in the full row."""
        return self.rank * self.length

    @property
    def reaches_B(self) -> Tensor:
        """True for rows in which the shard's first token belongs to the row's first document.

        Only in these rows can the row's initial state reach the shard, because that state belongs to the row's first
        document.
        """
        return self.behind_B == self.first

    @property
    def enters_B(self) -> Tensor:
        """True for rows in which the state before the shard's first token belongs to this token's document.

        In the other rows a document starts at the shard's first token, so the shard starts with a zero state.
        """
        return (self.behind_B > 0) | self.reaches_B

    def moved(self, move: Change) -> SequenceShard:
        """Return a copy on another device; `move` transfers one tensor."""
        return replace(self, behind_B=move(self.behind_B), unbroken_B=move(self.unbroken_B))


class DeviceNumbers:
    """A micro-batch's random numbers (`SeqInfo.number`) in fixed memory on the device, for passes in a CUDA graph.

    A graph would repeat a number that the host passes to a kernel. A purpose's number is stored when it is first used;
    `refill` replaces all stored numbers for the next micro-batch.
    """

    def __init__(self) -> None:
        self._key = 0
        self._stored: dict[str, Tensor] = {}

    def refill(self, key: int) -> None:
        """Replace all stored numbers by the numbers for `key`."""
        self._key = key
        if self._stored:
            numbers = torch.tensor([signed(seed_of(key, purpose)) for purpose in self._stored])
            torch._foreach_copy_(list(self._stored.values()), list(copied_to_device(numbers).unbind()))

    def of(self, purpose: str) -> Tensor:
        """Return the number for a purpose: int64, with the bits of `SeqInfo.number`."""
        if purpose not in self._stored:
            self._stored[purpose] = copied_to_device(torch.tensor(signed(seed_of(self._key, purpose))))
        return self._stored[purpose]


@dataclass(frozen=True)
class SeqInfo:
    """Positions and documents of a batch's tokens.

    positions_BL: int64 position of each token. With `isolate` it counts from the start of the token's document. With
        `join` it counts from the start of the text that the row continues.
    documents_BL: index of each token's document in its row, counted from 0; None with `join`. A mixer's initial state
        belongs to the row's first document, and its final state belongs to the row's last document.
    key: seed for the random choices of a training step, equal under every parallel layout; None outside training, where
        nothing is random.
    carried: whether the caller uses the mixers' final states. If False, mixers need not copy keys and values for these
        states.
    boundaries_E: offsets in the flattened batch at which documents begin, then the batch's end; `document_boundaries`
        computes them. If None, an op that needs boundaries computes them, and the host then waits for the GPU.
    shard: this rank's sequence shard; None if each rank has full rows.
    numbers: random numbers in the device's memory, for passes that a CUDA graph repeats; None otherwise.
    """

    positions_BL: Tensor
    documents_BL: Tensor | None = None
    key: int | None = None
    carried: bool = True
    boundaries_E: Tensor | None = None
    shard: SequenceShard | None = None
    numbers: DeviceNumbers | None = None
    _spans: list[list[tuple[int, int]]] = field(default_factory=list, repr=False, compare=False)
    _rope: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def rope(self, head_dim: int, rope: RopeOptions) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles, each (B, L, head_dim / 2) in fp32; computed once per batch."""
        if (head_dim, rope) not in self._rope:
            self._rope[head_dim, rope] = rope_table(self.positions_BL, head_dim, rope)
        return self._rope[head_dim, rope]

    def rope_in_row(self, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of rotary angles for indices in the row, instead of positions in the document.

        Each has shape (B, L + 1, head_dim / 2): there is one index more than the row has tokens. Both are computed once
        per batch.
        """
        if (head_dim, base, dtype) not in self._rope:
            rows, length = self.positions_BL.shape
            first = 0 if self.shard is None else self.shard.first
            indices_BL = torch.arange(first, first + length + 1, device=self.positions_BL.device).expand(rows, -1)
            self._rope[head_dim, base, dtype] = rope_table(indices_BL, head_dim, RopeOptions(base), dtype)
        return self._rope[head_dim, base, dtype]

    def number(self, purpose: str) -> int:
        """Return a pseudo-random 64-bit number that depends only on `key` and `purpose`."""
        return seed_of(self.key or 0, purpose)

    def number_for_device(self, purpose: str) -> int | Tensor:
        """Return `number(purpose)`: as an int, or in passes for a CUDA graph as a tensor on the device."""
        if self.numbers is None:
            return self.number(purpose)
        return self.numbers.of(purpose)

    def spans(self) -> list[list[tuple[int, int]]]:
        """Return the (begin, end) token indices for each row's documents; computed once per batch.

        If the tensors are on a GPU, the first call waits for the GPU.
        """
        if not self._spans:
            rows, length = self.positions_BL.shape
            boundaries = range(0, (rows + 1) * length, length)
            if self.documents_BL is not None:
                if self.boundaries_E is None:
                    boundaries_E = document_boundaries(self.documents_BL)
                else:
                    boundaries_E = self.boundaries_E
                boundaries = boundaries_E.tolist()
            self._spans.extend([] for _ in range(rows))
            for begin, end in pairwise(boundaries):
                if begin == end:
                    break  # only padding follows
                row, first = divmod(begin, length)
                self._spans[row].append((first, first + end - begin))
        return self._spans

    def padded(self, count: int) -> SeqInfo:
        """Return a copy without spans, whose boundaries are padded to `count` with the batch's end.

        Kernels read the padding as documents without tokens. So their launches have the same sizes for any number of
        documents. A copy of a batch without boundaries has none either.
        """
        if self.boundaries_E is None:
            return replace(self, _spans=[], _rope={})
        missing = count - len(self.boundaries_E)
        boundaries_E = functional.pad(self.boundaries_E, (0, missing), value=self.positions_BL.numel())
        return replace(self, boundaries_E=boundaries_E, _spans=[], _rope={})

    def with_boundaries(self) -> SeqInfo:
        """Return a copy with document boundaries and spans computed.

        Call this method while the tensors are on the CPU. If they are on a GPU, the host waits for the GPU.
        """
        if self.documents_BL is None:
            boundaries_E = None
        else:
            boundaries_E = document_boundaries(self.documents_BL)
        prepared = replace(self, boundaries_E=boundaries_E)
        prepared.spans()
        return prepared

    def map(self, change: Change) -> SeqInfo:
        """Select rows or tokens: return a copy with `change` applied to positions and documents.

        The copy has no boundaries, spans or angles, because these differ after a selection. They are computed when they
        are needed. The copy has no sequence shard either.
        """
        if self.documents_BL is None:
            documents_BL = None
        else:
            documents_BL = change(self.documents_BL)
        return SeqInfo(change(self.positions_BL), documents_BL, self.key, self.carried, numbers=self.numbers)

    def moved(self, move: Change) -> SeqInfo:
        """Return a copy on another device, with the boundaries and spans that are already computed.

        move: transfers one tensor
        """
        if self.boundaries_E is None:
            boundaries_E = None
        else:
            boundaries_E = move(self.boundaries_E)
        if self.shard is None:
            shard = None
        else:
            shard = self.shard.moved(move)
        return replace(self.map(move), boundaries_E=boundaries_E, shard=shard, _spans=self._spans)

    @staticmethod
    def stream(batch: int, length: int, start: int = 0, device: torch.device | str = "cpu") -> SeqInfo:
        """Return rows without document boundaries; their first token has position `start`."""
        positions = torch.arange(start, start + length, device=device)
        return SeqInfo(positions.expand(batch, length))


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    tokens_BL: input tokens
    labels_BL: the token to predict at each position
    mask_BL: whether the label counts in the loss
    continues_B: whether a row continues the last document in the row at the same index of the previous batch; None if
        no row continues a document
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    mask_BL: Tensor
    seq: SeqInfo
    continues_B: Tensor | None = None

    def map(self, change: Change) -> Batch:
        """Select rows: return a copy with `change` applied to every tensor."""
        return self._changed(change, self.seq.map(change))

    def moved(self, move: Change) -> Batch:
        """Return a copy on another device, with the document boundaries that are already computed.

        move: transfers one tensor
        """
        return self._changed(move, self.seq.moved(move))

    def _changed(self, change: Change, seq: SeqInfo) -> Batch:
        if self.continues_B is None:
            continues_B = None
        else:
            continues_B = change(self.continues_B)
        return Batch(change(self.tokens_BL), change(self.labels_BL), change(self.mask_BL), seq, continues_B)

    def with_boundaries(self) -> Batch:
        """Return a copy with document boundaries computed. Call this method while the tensors are on the CPU."""
        return replace(self, seq=self.seq.with_boundaries())

    def keyed(self, key: int, carried: bool = True) -> Batch:
        """Return a copy for training, with `key` and `carried` as in `SeqInfo`."""
        return replace(self, seq=replace(self.seq, key=key, carried=carried))

    def to(self, device: torch.device) -> Batch:
        """Return a copy on another device, without waiting for the transfer."""
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Batch]:
        """Split into batches with `rows` rows each, in order."""
        return [self.map(lambda t, i=first: t[i : i + rows]) for first in range(0, len(self.tokens_BL), rows)]

    def chunks(self, count: int) -> list[Batch]:
        """Split along the sequence into `count` equally long batches, in order."""
        length = self.tokens_BL.shape[1] // count
        if count == 1:
            return [self]
        return [self._chunk(first, length) for first in range(0, count * length, length)]

    def _chunk(self, first: int, length: int) -> Batch:
        here = slice(first, first + length)
        documents_BL = self.seq.documents_BL
        continues_B = self.continues_B
        if first and documents_BL is None:
            continues_B = torch.ones(len(self.tokens_BL), dtype=torch.bool, device=self.tokens_BL.device)
        elif first and documents_BL is not None:
            continues_B = documents_BL[:, first] == documents_BL[:, first - 1]
        seq = self.seq.map(lambda t: t[:, here].contiguous())
        tokens_BL, labels_BL, mask_BL = (t[:, here] for t in (self.tokens_BL, self.labels_BL, self.mask_BL))
        return Batch(tokens_BL, labels_BL, mask_BL, seq, continues_B)


def seed_of(seed: int, name: str) -> int:
    """Derive a 64-bit seed from another seed and a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def signed(number: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    if number >= 2**63:
        return number - 2**64
    return number


def step_key(seed: int, step: int, turn: int, first_row: int) -> int:
    """Derive the key for a micro-batch (`SeqInfo.key`).

    seed: the phase's seed
    turn: index of the micro-batch among the consecutive chunks that `Batch.chunks` returned
    first_row: index of the micro-batch's first row in the global batch
    """
    return seed_of(seed, f"{step}/{turn}/{first_row}")
