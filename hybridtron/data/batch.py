"""A batch of rows as the model sees it, and each token's place in its document.

B rows (lanes), L tokens in a row. Everything that depends on the batch alone is computed here, once, not in every
layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.rope import RopeOptions
from hybridtron.ops.documents import document_boundaries
from hybridtron.ops.rope import rope_table

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowShare:
    """A context-parallel rank's sequence shard: the same part of every row in the batch (`parallel/context.py`).

    size, rank: number of shards in a row, and which of them this rank has
    spans: begin and end of each document, in the full rows
    length: tokens in a shard
    behind_B: tokens before the shard, in its row, that belong to its first document
    unbroken_B: True where all tokens in the shard belong to one document
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
        """Place in the row where the shard begins."""
        return self.rank * self.length

    @property
    def reaches_B(self) -> Tensor:
        """True where the shard's first document is also the row's first. A carried state belongs to that document."""
        return self.behind_B == self.first

    @property
    def enters_B(self) -> Tensor:
        """True where a state from before the shard belongs to the document of its first token."""
        return (self.behind_B > 0) | self.reaches_B

    def moved(self, move: Change) -> RowShare:
        """Return a copy with its tensors on another device."""
        return replace(self, behind_B=move(self.behind_B), unbroken_B=move(self.unbroken_B))


@dataclass(frozen=True)
class SeqInfo:
    """Positions and documents of a batch's tokens.

    positions_BL: position of each token in its document (`isolate`) or in its row's stream (`join`), int64.
    documents_BL: index of each token's document within its row, from 0; None where a row is one stream (`join`),
        without boundaries. A mixer's initial state belongs to the row's first document, its final state to the last.
    key: seed for the random choices of a training step, equal under every layout; None outside training, where nothing
        is random.
    carried: whether the final states are used. If not, mixers need not copy keys and values for them.
    boundaries_E: where documents begin, from `document_boundaries`. Without it, a kernel that needs it waits for the
        device.
    share: this rank's sequence shard; None where ranks have full rows.
    """

    positions_BL: Tensor
    documents_BL: Tensor | None = None
    key: int | None = None
    carried: bool = True
    boundaries_E: Tensor | None = None
    share: RowShare | None = None
    _spans: list[list[tuple[int, int]]] = field(default_factory=list, repr=False, compare=False)
    _rope: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def rope(self, head_dim: int, rope: RopeOptions) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles, each (B, L, head_dim / 2) in fp32; computed once per batch."""
        if (head_dim, rope) not in self._rope:
            self._rope[head_dim, rope] = rope_table(self.positions_BL, head_dim, rope)
        return self._rope[head_dim, rope]

    def rope_in_row(self, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin by place in the row, whatever its documents, each (B, L + 1, head_dim / 2).

        The last place is the one after the row's last token. Computed once per batch.
        """
        if (head_dim, base, dtype) not in self._rope:
            rows, length = self.positions_BL.shape
            first = 0 if self.share is None else self.share.first
            places_BL = torch.arange(first, first + length + 1, device=self.positions_BL.device).expand(rows, -1)
            self._rope[head_dim, base, dtype] = rope_table(places_BL, head_dim, RopeOptions(base), dtype)
        return self._rope[head_dim, base, dtype]

    def number(self, purpose: str) -> int:
        """Return a random 64-bit number: a function of the key and the purpose."""
        return seed_of(self.key or 0, purpose)

    def spans(self) -> list[list[tuple[int, int]]]:
        """Return each row's documents as (begin, end) pairs; computed once per batch.

        With tensors on a GPU, the first call waits for the device.
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
                row, first = divmod(begin, length)
                self._spans[row].append((first, first + end - begin))
        return self._spans

    def with_boundaries(self) -> SeqInfo:
        """Return a copy with document boundaries computed.

        Call it on the CPU, where this does not wait for a device.
        """
        if self.documents_BL is None:
            boundaries_E = None
        else:
            boundaries_E = document_boundaries(self.documents_BL)
        with_borders = replace(self, boundaries_E=boundaries_E)
        with_borders.spans()
        return with_borders

    def map(self, change: Change) -> SeqInfo:
        """Apply `change` to every tensor, to get other rows or tokens.

        Values derived from the tensors are computed again.
        """
        if self.documents_BL is None:
            documents_BL = None
        else:
            documents_BL = change(self.documents_BL)
        return SeqInfo(change(self.positions_BL), documents_BL, self.key, self.carried)

    def moved(self, move: Change) -> SeqInfo:
        """Return a copy on another device. It keeps the document boundaries that are known."""
        if self.boundaries_E is None:
            boundaries_E = None
        else:
            boundaries_E = move(self.boundaries_E)
        if self.share is None:
            share = None
        else:
            share = self.share.moved(move)
        return replace(self.map(move), boundaries_E=boundaries_E, share=share, _spans=self._spans)

    @staticmethod
    def stream(batch: int, length: int, start: int = 0, device: torch.device | str = "cpu") -> SeqInfo:
        """Return rows without document boundaries; their first token has position `start`."""
        positions = torch.arange(start, start + length, device=device)
        return SeqInfo(positions.expand(batch, length))


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    labels_BL, mask_BL: the token to predict at each position, and whether it counts in the loss
    continues_B: whether a row's first token continues the document that its lane read at the end of the step before;
        None where no row does
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    mask_BL: Tensor
    seq: SeqInfo
    continues_B: Tensor | None = None

    def map(self, change: Change) -> Batch:
        """Apply `change` to every tensor, to get other rows or tokens."""
        return self._changed(change, self.seq.map(change))

    def moved(self, move: Change) -> Batch:
        """Return a copy on another device, by `move`. It keeps the document boundaries that are known."""
        return self._changed(move, self.seq.moved(move))

    def _changed(self, change: Change, seq: SeqInfo) -> Batch:
        if self.continues_B is None:
            continues_B = None
        else:
            continues_B = change(self.continues_B)
        return Batch(change(self.tokens_BL), change(self.labels_BL), change(self.mask_BL), seq, continues_B)

    def with_boundaries(self) -> Batch:
        """Return a copy with document boundaries computed, for use on the host."""
        return replace(self, seq=self.seq.with_boundaries())

    def keyed(self, key: int, carried: bool = True) -> Batch:
        """Return a copy for training.

        `key` seeds its random choices; `carried` says whether its final states are used.
        """
        return replace(self, seq=replace(self.seq, key=key, carried=carried))

    def to(self, device: torch.device) -> Batch:
        """Return a copy on another device, without waiting for the transfer."""
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Batch]:
        """Split into batches with `rows` rows each, in order."""
        return [self.map(lambda t, i=first: t[i : i + rows]) for first in range(0, len(self.tokens_BL), rows)]

    def chunks(self, count: int) -> list[Batch]:
        """Split along the sequence into `count` chunks of equal length. Each chunk continues the chunk before it."""
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


def step_key(seed: int, step: int, turn: int, first_row: int) -> int:
    """Derive a micro-batch's key from its phase's seed, step, chunk (`turn`) and first row in the global batch."""
    return seed_of(seed, f"{step}/{turn}/{first_row}")
