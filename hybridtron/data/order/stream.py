"""The order of a source's documents and of its training rows, as pure functions of (seed, position).

A source's documents, epoch after epoch without a gap, are one endless stream of tokens. In each epoch the shards are
shuffled and gathered to blocks of at least `shuffle_tokens` tokens, and the documents of a block are shuffled among
each other; so only the shards of a block or two are in use at a time, and only their documents are in memory. Window w
is the L + 1 tokens from position w L on, so that each token is an input exactly once an epoch and no tail is dropped.
The windows that begin in an epoch are cut into groups of about `shuffle_tokens` inputs, each shuffled among themselves.

A shard is never divided: one with more than `shuffle_tokens` tokens is a block of its own, whatever its size.

All shuffles sort random words of Philox, whose output is fixed for all versions of numpy; `Generator`'s is not.

Letters: L input tokens of a row.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class Span(NamedTuple):
    """`count` tokens of a document from its `first` on; documents are numbered through the source, shard by shard."""

    document: int
    first: int
    count: int


def permutation(count: int, seed: int, purpose: str, *numbers: int) -> np.ndarray:
    """The numbers below `count` in random order: a pure function of its arguments."""
    domain = repr((int(seed), purpose, *map(int, numbers))).encode()  # numpy's integers print otherwise
    key = int.from_bytes(hashlib.blake2b(domain, digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


class Recent:
    """A pure function with its last `size` results; a pickle carries the function alone."""

    def __init__(self, function: Callable[..., Any], size: int) -> None:
        self._arguments = function, size
        self._cached = functools.lru_cache(maxsize=size)(function)

    def __call__(self, *arguments: int) -> Any:
        return self._cached(*arguments)

    def __reduce__(self) -> tuple[type[Recent], tuple[Callable[..., Any], int]]:
        return Recent, self._arguments


def cut(documents: np.ndarray, ends: np.ndarray, start: int, count: int) -> list[Span]:
    """At most `count` tokens from `start` on, of documents that lie end to end and end at `ends`."""
    stop = min(start + count, int(ends[-1]))
    left = int(ends.searchsorted(start, side="right"))
    right = int(ends.searchsorted(stop)) + 1
    begin = int(ends[left - 1]) if left else 0
    spans = []
    for document, end in zip(documents[left:right].tolist(), ends[left:right].tolist(), strict=True):
        taken = min(end, stop) - start
        spans.append(Span(document, start - begin, taken))
        start = begin = end
    return spans


class _Blocks(NamedTuple):
    """An epoch's shards in order; block k holds shards[cuts[k] : cuts[k + 1]], tokens starts[k] to starts[k + 1]."""

    shards: np.ndarray
    cuts: list[int]
    starts: np.ndarray


class Counted(Protocol):
    """What a stream has to know of a source: a `DocumentStore` does."""

    lengths: np.ndarray
    shard_documents: np.ndarray
    shard_tokens: np.ndarray


class DocumentStream:
    """Every document of one source, epoch after epoch, shuffled in blocks: an endless stream of tokens.

    `lengths` are the tokens of each document, at least 1, and may be memory-mapped: only slices are read. Without a
    seed the order is that of the files. Two sources that should not be shuffled alike need seeds of their own.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        shard_documents: Sequence[int] | np.ndarray,
        shard_tokens: Sequence[int] | np.ndarray,
        shuffle_tokens: int,
        seed: int | None,
    ) -> None:
        self._shard_documents = np.asarray(shard_documents, dtype=np.int64)
        self._shard_tokens = np.asarray(shard_tokens, dtype=np.int64)
        if len(self._shard_documents) != len(self._shard_tokens):
            raise ValueError(
                f"{len(self._shard_documents)} shards by shard_documents, {len(self._shard_tokens)} by shard_tokens"
            )
        self._first_documents = np.cumsum(self._shard_documents) - self._shard_documents
        if len(lengths) != self._shard_documents.sum():
            raise ValueError(f"{len(lengths)} lengths for {self._shard_documents.sum()} documents in the shards")
        if len(lengths) == 0:
            raise ValueError("the source has no documents")
        self.tokens_per_epoch = int(self._shard_tokens.sum())
        self._lengths = lengths
        self._shuffle_tokens = 1 if seed is None else shuffle_tokens  # unshuffled, a block is a shard
        self._seed = seed
        self._blocks = Recent(self._gathered, 2)
        self._block = Recent(self._arranged, 4)

    @staticmethod
    def of(source: Counted, shuffle_tokens: int = 1, seed: int | None = None) -> DocumentStream:
        """The stream of a source; without a seed as its files stand."""
        return DocumentStream(source.lengths, source.shard_documents, source.shard_tokens, shuffle_tokens, seed)

    def spans(self, start: int, count: int) -> list[Span]:
        """Where the `count` tokens from position `start` of the stream on are found, document by document."""
        spans = []
        while count:
            documents, ends, offset = self._block_at(start)
            spans += cut(documents, ends, offset, count)
            taken = min(count, int(ends[-1]) - offset)
            start, count = start + taken, count - taken
        return spans

    def border(self, position: int) -> int:
        """The position of the first document that starts at `position` or after it."""
        _, ends, offset = self._block_at(position)
        return position + int(ends[ends.searchsorted(offset)]) - offset if offset else position

    def documents(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents between two borders and their lengths, both int64."""
        numbers, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while start < end:
            documents, ends, offset = self._block_at(start)
            stop = min(offset + end - start, int(ends[-1]))
            left = int(ends.searchsorted(offset)) + 1 if offset else 0
            right = int(ends.searchsorted(stop)) + 1
            assert (ends[left - 1] if left else 0) == offset, f"no document starts at position {start}"
            assert ends[right - 1] == stop, f"no document ends at position {start + stop - offset}"
            numbers.append(documents[left:right])
            lengths.append(np.diff(ends[left:right], prepend=offset))
            start += stop - offset
        return np.concatenate(numbers), np.concatenate(lengths)

    def _block_at(self, position: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The documents of the block around a position of the stream, their ends, and the position in the block."""
        epoch, offset = divmod(position, self.tokens_per_epoch)
        turn = 0 if self._seed is None else epoch
        starts = self._blocks(turn).starts
        number = int(starts.searchsorted(offset, side="right")) - 1
        documents, ends = self._block(turn, number)
        return documents, ends, offset - int(starts[number])

    def _gathered(self, epoch: int) -> _Blocks:
        shards = np.flatnonzero(self._shard_documents)
        if self._seed is not None:
            shards = shards[permutation(len(shards), self._seed, "shards", epoch)]
        ends = np.cumsum(self._shard_tokens[shards])
        cuts, starts = [0], [0]
        while cuts[-1] < len(shards):
            last = min(int(ends.searchsorted(starts[-1] + self._shuffle_tokens)), len(shards) - 1)
            cuts.append(last + 1)
            starts.append(int(ends[last]))
        if len(cuts) > 2 and 2 * (starts[-1] - starts[-2]) < self._shuffle_tokens:
            del cuts[-2], starts[-2]  # a small rest would be hardly shuffled
        return _Blocks(shards, cuts, np.array(starts))

    def _arranged(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a block in their order, and the end of each within the block; both int64."""
        shards, cuts, starts = self._blocks(epoch)
        runs = []
        for shard in shards[cuts[number] : cuts[number + 1]].tolist():
            first = int(self._first_documents[shard])
            runs.append((first, first + int(self._shard_documents[shard])))
        documents = np.concatenate([np.arange(first, end) for first, end in runs])
        lengths = np.concatenate([self._lengths[first:end] for first, end in runs])
        if self._seed is not None:
            order = permutation(len(documents), self._seed, "documents", epoch, number)
            documents, lengths = documents[order], lengths[order]
        ends = np.cumsum(lengths, dtype=np.int64)
        tokens = int(starts[number + 1] - starts[number])
        if ends[-1] != tokens:
            raise ValueError(
                f"the lengths of a block's documents add up to {ends[-1]} tokens, its shards have {tokens}"
            )
        return documents, ends

    def __getstate__(self) -> dict[str, Any]:
        """A whole memory-mapped file goes by its name: a pickle would copy what is in it."""
        lengths = self._lengths
        if isinstance(lengths, np.memmap) and isinstance(lengths.base, mmap.mmap) and lengths.filename is not None:
            lengths = (lengths.filename, lengths.dtype, "r", lengths.offset, lengths.shape)
        return self.__dict__ | {"_lengths": lengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self._lengths, tuple):
            self._lengths = np.memmap(*self._lengths)


class ShuffledWindows:
    """Row r of training: a window of L + 1 tokens of the stream, shuffled within its group; unshuffled without a seed.

    Position r L of the stream lies in epoch floor(r L / tokens of an epoch), so row r is found directly.
    """

    def __init__(self, stream: DocumentStream, seq_len: int, shuffle_tokens: int, seed: int | None) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._windows_per_group = max(1, shuffle_tokens // seq_len)
        self._seed = seed
        self._order = Recent(self._shuffled, 4)

    def spans(self, row: int) -> list[Span]:
        """Where the L + 1 tokens of a row are found."""
        return self._stream.spans(self.window(row) * self._seq_len, self._seq_len + 1)

    def window(self, row: int) -> int:
        """Which window of the stream a row is."""
        if self._seed is None:
            return row
        epoch = row * self._seq_len // self._stream.tokens_per_epoch
        first = self._first(epoch)
        windows = self._first(epoch + 1) - first
        groups = self._groups(windows)
        group = ((row - first + 1) * groups - 1) // windows  # the last one that begins at this row or before
        begin = first + group * windows // groups
        return begin + int(self._order(epoch, group)[row - begin])

    def _first(self, epoch: int) -> int:
        """The first window that begins in an epoch."""
        return -(-epoch * self._stream.tokens_per_epoch // self._seq_len)

    def _groups(self, windows: int) -> int:
        """Into how many groups of nearly equal size the windows of an epoch are cut."""
        return max(1, (windows + self._windows_per_group // 2) // self._windows_per_group)

    def _shuffled(self, epoch: int, group: int) -> np.ndarray:
        windows = self._first(epoch + 1) - self._first(epoch)
        groups = self._groups(windows)
        count = (group + 1) * windows // groups - group * windows // groups
        assert self._seed is not None
        return permutation(count, self._seed, "windows", epoch, group)
