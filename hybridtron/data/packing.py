"""Documents -> rows, as pure functions of (seed, row): nothing is replayed, and no state is kept.

The documents of a split, in an order of their own for each epoch, are one endless stream of tokens: epoch 0, epoch 1
and so on, without a gap. Window w is the L + 1 tokens from position w L on, so that each token is an input exactly
once an epoch and no tail is dropped. The windows that begin in an epoch are shuffled among themselves. Since position
r L of the stream lies in epoch floor(r L / T), T being the tokens of an epoch, row r is found directly.

Both shuffles sort random words of Philox, whose output is fixed for all versions of numpy; `Generator`'s is not.

A row's first token may stand in the middle of a document. No state is carried into it in this form, so under `isolate`
positions count from 0 at the row's first token too, and not from the document's first.

Letters: B rows, L input tokens a row, T = L + 1 tokens with the last label.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DOCUMENTS, WINDOWS = 0, 1  # what a permutation is for


class Span(NamedTuple):
    """`count` tokens of one document, from `first` on in the split's file."""

    first: int
    count: int


def permutation(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """The numbers below `count` in random order: a pure function of its arguments."""
    generator = np.random.Philox(key=(2 * epoch + purpose) << 64 | seed % 2**64)
    return np.argsort(generator.random_raw(count), kind="stable")


class Stream:
    """Every document of a split, epoch after epoch: in the order of the file without a seed, else shuffled."""

    def __init__(self, lengths: np.ndarray, seed: int | None = None) -> None:
        self.tokens_per_epoch = int(lengths.sum())
        self._lengths = lengths
        self._seed = seed
        self._epoch = functools.lru_cache(maxsize=2)(self._arranged)

    def spans(self, start: int, count: int) -> list[Span]:
        """Where the `count` tokens from position `start` of the stream on are found, document by document."""
        spans = []
        while count:
            epoch, offset = divmod(start, self.tokens_per_epoch)
            ends, shifts = self._epoch(epoch)
            document = np.searchsorted(ends, offset, side="right")
            taken = min(count, int(ends[document]) - offset)
            spans.append(Span(offset + int(shifts[document]), taken))
            start, count = start + taken, count - taken
        return spans

    def _arranged(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each document in the epoch's order: its end in the epoch, and its place in the file less that there."""
        ends_in_file = np.cumsum(self._lengths)
        if self._seed is None:
            return ends_in_file, np.zeros_like(ends_in_file)
        order = permutation(len(self._lengths), self._seed, epoch, DOCUMENTS)
        ends = np.cumsum(self._lengths[order])
        return ends, ends_in_file[order] - ends


class ShuffledWindows:
    """Row r of training, counted from the start of the phase: a window of the stream, shuffled within its epoch."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int) -> None:
        self._stream = Stream(lengths, seed)
        self._seq_len = seq_len
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def spans(self, row: int) -> list[Span]:
        """Where the L + 1 tokens of a row are found."""
        return self._stream.spans(self.window(row) * self._seq_len, self._seq_len + 1)

    def window(self, row: int) -> int:
        """Which window of the stream a row is."""
        epoch = row * self._seq_len // self._stream.tokens_per_epoch
        first = self._first(epoch)
        return first + int(self._order(epoch)[row - first])

    def _first(self, epoch: int) -> int:
        """The first window that begins in an epoch."""
        return -(-epoch * self._stream.tokens_per_epoch // self._seq_len)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return permutation(self._first(epoch + 1) - self._first(epoch), self._seed, epoch, WINDOWS)


def sequential_rows(lengths: np.ndarray, seq_len: int, tokens: int) -> list[list[Span]]:
    """Rows of a split in the order of its file, about `tokens` inputs: at least one row, at most what is there."""
    stream = Stream(lengths)
    available = (stream.tokens_per_epoch - 1) // seq_len
    if available < 1:
        raise ValueError(
            f"{stream.tokens_per_epoch} tokens do not make one row of seq_len={seq_len}, which takes one more"
        )
    rows = min(max(1, tokens // seq_len), available)
    return [stream.spans(row * seq_len, seq_len + 1) for row in range(rows)]


def gather(tokens: np.ndarray, rows: Sequence[Sequence[Span]]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of rows, int64, and the index of each token's document within its row, int32; both (B, T)."""
    tokens_BT = np.stack([np.concatenate([tokens[s.first : s.first + s.count] for s in row]) for row in rows])
    documents_BT = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), [s.count for s in row]) for row in rows])
    return tokens_BT.astype(np.int64), documents_BT


def same_document(documents_BT: np.ndarray) -> np.ndarray:
    """Whether each position's label belongs to its own document; (B, L)."""
    return documents_BT[:, :-1] == documents_BT[:, 1:]


def positions_in_document(documents_BL: np.ndarray) -> np.ndarray:
    """Position of each token, counted from its document's first token in the row; int64 (B, L)."""
    positions_L = np.arange(documents_BL.shape[1])
    starts_BL = np.zeros(documents_BL.shape, dtype=np.int64)
    starts_BL[:, 1:] = np.where(same_document(documents_BL), 0, positions_L[1:])
    return positions_L - np.maximum.accumulate(starts_BL, axis=1)
