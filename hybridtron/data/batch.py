"""What the model sees of the data: a batch of rows, and where in their documents the tokens stand.

B rows (lanes), L tokens a row. Everything that depends on the batch alone is computed here, once, not in every layer.
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
from hybridtron.ops.documents import document_borders
from hybridtron.ops.rope import rope_table

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowShare:
    """Which part of its rows a rank has, where the tokens of every row are shared out (`parallel/context.py`).

    spans: where documents begin and end in whole rows. length: tokens of each share. behind_B: how many tokens before
    the share, in its row, are of its first document. unbroken_B: whether no document begins inside it.
    """

    size: int
    rank: int
    group: Any  # of the ranks that share the rows
    spans: list[list[tuple[int, int]]]
    length: int
    behind_B: Tensor
    unbroken_B: Tensor

    @property
    def first(self) -> int:
        """Where in the row it begins."""
        return self.rank * self.length

    @property
    def reaches_B(self) -> Tensor:
        """Whether its first document is the row's first, to which a carried state belongs."""
        return self.behind_B == self.first

    @property
    def enters_B(self) -> Tensor:
        """Whether its first token continues the document of the token before."""
        return (self.behind_B > 0) | self.reaches_B

    def moved(self, move: Change) -> RowShare:
        return replace(self, behind_B=move(self.behind_B), unbroken_B=move(self.unbroken_B))


@dataclass(frozen=True)
class SeqInfo:
    """Where each token stands.

    positions_BL: position of each token in its document (`isolate`) or in its row's stream (`join`), int64.
    documents_BL: index of each token's document within its row, counting up from 0; None where rows are one stream
    (`join`), and then nothing is cut. A state that is handed to a mixer belongs to the row's first document, and the
    state that comes back belongs to its last.
    key: what the random choices of a training step are functions of, the same under every layout; None outside
    training, where nothing is random.
    carried: whether the states after the rows are used; where they are not, keys and values need not be copied for it.
    borders_E: where documents begin, as `document_borders` says; without it a kernel that asks has to wait.
    share: where in its rows a rank's tokens stand, if rows are shared out over ranks.
    """

    positions_BL: Tensor
    documents_BL: Tensor | None = None
    key: int | None = None
    carried: bool = True
    borders_E: Tensor | None = None
    share: RowShare | None = None
    _spans: list[list[tuple[int, int]]] = field(default_factory=list, repr=False, compare=False)
    _rope: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def rope(self, head_dim: int, rope: RopeOptions) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary angles, each (B, L, head_dim / 2) in fp32; computed once per batch."""
        if (head_dim, rope) not in self._rope:
            self._rope[head_dim, rope] = rope_table(self.positions_BL, head_dim, rope)
        return self._rope[head_dim, rope]

    def rope_in_row(self, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same by place in the row, whatever documents it holds, up to the place behind it: (B, L + 1, ...)."""
        if (head_dim, base, dtype) not in self._rope:
            rows, length = self.positions_BL.shape
            first = 0 if self.share is None else self.share.first
            places_BL = torch.arange(first, first + length + 1, device=self.positions_BL.device).expand(rows, -1)
            self._rope[head_dim, base, dtype] = rope_table(places_BL, head_dim, RopeOptions(base), dtype)
        return self._rope[head_dim, base, dtype]

    def number(self, purpose: str) -> int:
        """A random number of 64 bits: a function of the key and of what it is for."""
        return seed_of(self.key or 0, purpose)

    def spans(self) -> list[list[tuple[int, int]]]:
        """Of each row, where its documents begin and end; read once per batch."""
        if not self._spans:
            rows, length = self.positions_BL.shape
            borders = range(0, (rows + 1) * length, length)
            if self.documents_BL is not None:
                borders_E = document_borders(self.documents_BL) if self.borders_E is None else self.borders_E
                borders = borders_E.tolist()
            self._spans.extend([] for _ in range(rows))
            for begin, end in pairwise(borders):
                row, first = divmod(begin, length)
                self._spans[row].append((first, first + end - begin))
        return self._spans

    def bordered(self) -> SeqInfo:
        """The same, with what is asked of documents' borders: on a CPU, where nothing waits for the answer."""
        borders_E = None if self.documents_BL is None else document_borders(self.documents_BL)
        found = replace(self, borders_E=borders_E)
        found.spans()
        return found

    def map(self, change: Change) -> SeqInfo:
        """Other rows or tokens: every tensor changed; what is computed from them is computed again."""
        documents_BL = None if self.documents_BL is None else change(self.documents_BL)
        return SeqInfo(change(self.positions_BL), documents_BL, self.key, self.carried)

    def moved(self, move: Change) -> SeqInfo:
        """The same rows on another device, with what is known of their documents."""
        borders_E = None if self.borders_E is None else move(self.borders_E)
        share = None if self.share is None else self.share.moved(move)
        return replace(self.map(move), borders_E=borders_E, share=share, _spans=self._spans)

    @staticmethod
    def stream(batch: int, length: int, start: int = 0, device: torch.device | str = "cpu") -> SeqInfo:
        """Rows without borders, whose first token has position `start`."""
        positions = torch.arange(start, start + length, device=device)
        return SeqInfo(positions.expand(batch, length))


@dataclass(frozen=True)
class Batch:
    """One micro-batch. labels_BL is the token to predict at each position, mask_BL whether it counts in the loss.

    continues_B: whether a row's first token follows, in its document, the last token that its lane read in the step
    before; None where no row's does.
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    mask_BL: Tensor
    seq: SeqInfo
    continues_B: Tensor | None = None

    def map(self, change: Change) -> Batch:
        """Other rows or tokens: every tensor changed."""
        return self._changed(change, self.seq.map(change))

    def moved(self, move: Change) -> Batch:
        """The same batch on another device."""
        return self._changed(move, self.seq.moved(move))

    def _changed(self, change: Change, seq: SeqInfo) -> Batch:
        continues_B = None if self.continues_B is None else change(self.continues_B)
        return Batch(change(self.tokens_BL), change(self.labels_BL), change(self.mask_BL), seq, continues_B)

    def bordered(self) -> Batch:
        """The same, with what the host asks of its documents."""
        return replace(self, seq=self.seq.bordered())

    def keyed(self, key: int, carried: bool = True) -> Batch:
        """The same batch in training: what its random choices are functions of, whether its states are carried."""
        return replace(self, seq=replace(self.seq, key=key, carried=carried))

    def to(self, device: torch.device) -> Batch:
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Batch]:
        """Batches of `rows` rows each, in order."""
        return [self.map(lambda t, i=first: t[i : i + rows]) for first in range(0, len(self.tokens_BL), rows)]

    def chunks(self, count: int) -> list[Batch]:
        """`count` chunks of equal length along the rows; each but the first continues where the one before it ends."""
        length = self.tokens_BL.shape[1] // count
        return [self] if count == 1 else [self._chunk(first, length) for first in range(0, count * length, length)]

    def _chunk(self, first: int, length: int) -> Batch:
        here = slice(first, first + length)
        documents_BL, continues_B = self.seq.documents_BL, self.continues_B
        if first and documents_BL is None:
            continues_B = torch.ones(len(self.tokens_BL), dtype=torch.bool, device=self.tokens_BL.device)
        elif first and documents_BL is not None:
            continues_B = documents_BL[:, first] == documents_BL[:, first - 1]
        seq = self.seq.map(lambda t: t[:, here].contiguous())
        tokens_BL, labels_BL, mask_BL = (t[:, here] for t in (self.tokens_BL, self.labels_BL, self.mask_BL))
        return Batch(tokens_BL, labels_BL, mask_BL, seq, continues_B)


def seed_of(seed: int, name: str) -> int:
    """64 bits of a seed and of what they are for."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def step_key(seed: int, step: int, turn: int, first_row: int) -> int:
    """The key of a micro-batch: its phase's seed, the step, which chunk of its lanes it is, its first row of all."""
    return seed_of(seed, f"{step}/{turn}/{first_row}")
