"""The order of a source's documents, as a pure function of (seed, position), and where tokens are found.

A source's documents, epoch after epoch without a gap, are one endless stream of tokens. In each epoch the shards are
shuffled and gathered to blocks of at least `shuffle_tokens` tokens, and the documents of a block are shuffled among
each other; so only the shards of a block or two are in use at a time, and only their documents are in memory.

A shard is never divided: one with more than `shuffle_tokens` tokens is a block of its own, whatever its size.

All shuffles sort random words of Philox, whose output is fixed for all versions of numpy; `Generator`'s is not.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hybridtron.data.mds.store import DocumentStore


class Span(NamedTuple):
    """`count` tokens of a document from its `first` on; documents are numbered through the source, shard by shard."""

    document: int
    first: int
    count: int


class RowSpans(NamedTuple):
    """Where the tokens of a row are, as (source, span), and the position of the first in what its lane reads.

    That is above 0 where the token follows, in the same document, what the lane read in the step before.
    """

    spans: list[tuple[int, Span]]
    position: int


def permutation(count: int, seed: int, purpose: str, *numbers: int) -> np.ndarray:
    """The numbers below `count` in random order: a pure function of its arguments."""
    domain = repr((int(seed), purpose, *map(int, numbers))).encode()  # numpy's integers print otherwise
    key = int.from_bytes(hashlib.blake2b(domain, digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


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


class DocumentStream:
    """Every document of one source, epoch after epoch, shuffled in blocks: an endless stream of tokens.

    Without a seed the order is that of the files. Two sources that must not be shuffled alike need seeds of their own.
    Of the documents' lengths only slices are read.
    """

    def __init__(self, source: DocumentStore, shuffle_tokens: int = 1, seed: int | None = None) -> None:
        self._lengths, self._shard_tokens = source.lengths, np.asarray(source.shard_tokens, dtype=np.int64)
        self._borders = np.append(0, np.cumsum(source.shard_documents, dtype=np.int64))  # between shards, in documents
        if len(source.lengths) == 0:
            raise ValueError("the source has no documents")
        self.tokens_per_epoch = int(self._shard_tokens.sum())
        self._shuffle_tokens = 1 if seed is None else shuffle_tokens  # unshuffled, a block is a shard
        self._seed = seed
        self._blocks = lru_cache(maxsize=2)(self._gathered)
        self._block = lru_cache(maxsize=4)(self._arranged)

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
        shards = np.flatnonzero(np.diff(self._borders))
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
        runs = [self._borders[shard : shard + 2].tolist() for shard in shards[cuts[number] : cuts[number + 1]]]
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
