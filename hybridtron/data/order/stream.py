"""The endless token stream of one source: each epoch has all documents in shuffled order.

In each epoch the data shards are shuffled and grouped into blocks of whole shards with at least `shuffle_tokens`
tokens. Each block's documents are shuffled. So a reader uses the shards from one or two blocks at a time, and only the
document lengths for these blocks are in memory. Every part of the order is a pure function of (seed, position).

A shuffle sorts random 64-bit numbers from numpy's Philox, because numpy guarantees that their values stay equal in all
versions. The values from numpy's `Generator` methods may change.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hybridtron.data.mds.store import DocumentStore


class Span(NamedTuple):
    """`count` consecutive tokens in a document, starting at its token `first`.

    document: the document's number within the source, counted shard by shard
    """

    document: int
    first: int
    count: int


class RowSpans(NamedTuple):
    """A row's tokens.

    spans: (source index, span) pairs, whose tokens are concatenated
    position: position of the row's first token in the document that its lane reads; always 0 with
        `data.order=windows`
    """

    spans: list[tuple[int, Span]]
    position: int


def permutation(count: int, seed: int, purpose: str, *numbers: int) -> np.ndarray:
    """Return the integers from 0 to `count - 1` in random order, as a pure function of the arguments."""
    domain = repr((int(seed), purpose, *map(int, numbers))).encode()  # `int`, because numpy integers have another repr
    key = int.from_bytes(hashlib.blake2b(domain, digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def cut(documents: np.ndarray, ends: np.ndarray, start: int, count: int) -> list[Span]:
    """Return the spans of contiguous documents for `count` tokens from offset `start`, or for all that remain.

    documents: each document's number
    ends: token offset at which each document ends
    """
    stop = min(start + count, int(ends[-1]))
    left = int(ends.searchsorted(start, side="right"))
    right = int(ends.searchsorted(stop)) + 1
    begin = int(ends[left - 1]) if left else 0
    spans = []
    for document, end in zip(documents[left:right].tolist(), ends[left:right].tolist(), strict=True):
        num_tokens = min(end, stop) - start
        spans.append(Span(document, start - begin, num_tokens))
        start = begin = end
    return spans


class _Blocks(NamedTuple):
    """An epoch's blocks.

    shards: the shards' indices, in shuffled order
    cuts: block k has the shards shards[cuts[k] : cuts[k + 1]]
    starts: block k has the epoch's tokens from starts[k] up to, but not including, starts[k + 1]
    """

    shards: np.ndarray
    cuts: list[int]
    starts: np.ndarray


class DocumentStream:
    """Endless token stream from one source: every document, epoch after epoch, shuffled in blocks.

    seed: seed of the shuffles; None to keep the files' order. Each source needs its own seed, because sources with
        equal seeds and sizes are shuffled in the same way.
    """

    def __init__(self, source: DocumentStore, shuffle_tokens: int = 1, seed: int | None = None) -> None:
        self._lengths, self._shard_tokens = source.lengths, np.asarray(source.shard_tokens, dtype=np.int64)
        # number of each shard's first document
        self._boundaries = np.append(0, np.cumsum(source.shard_documents, dtype=np.int64))
        if len(source.lengths) == 0:
            raise ValueError("the source has no documents")
        self.tokens_per_epoch = int(self._shard_tokens.sum())
        self._shuffle_tokens = 1 if seed is None else shuffle_tokens  # without shuffling, each shard is a block
        self._seed = seed
        # a row may contain tokens of two epochs, and of several blocks
        self._blocks = lru_cache(maxsize=2)(self._gathered)
        self._block = lru_cache(maxsize=4)(self._arranged)

    def spans(self, start: int, count: int) -> list[Span]:
        """Return the spans that hold `count` tokens from stream position `start`, document by document."""
        spans = []
        while count:
            documents, ends, offset = self._block_at(start)
            spans += cut(documents, ends, offset, count)
            num_taken = min(count, int(ends[-1]) - offset)
            start = start + num_taken
            count = count - num_taken
        return spans

    def boundary(self, position: int) -> int:
        """Return the first position at or after `position` where a document starts."""
        _, ends, offset = self._block_at(position)
        if offset:
            return position + int(ends[ends.searchsorted(offset)]) - offset
        return position

    def documents(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and the lengths of the documents between two document boundaries, as int64 arrays."""
        numbers = [np.empty(0, np.int64)]
        lengths = [np.empty(0, np.int64)]
        while start < end:
            documents, ends, offset = self._block_at(start)
            stop = min(offset + end - start, int(ends[-1]))
            if offset:
                left = int(ends.searchsorted(offset)) + 1
            else:
                left = 0
            right = int(ends.searchsorted(stop)) + 1
            assert (ends[left - 1] if left else 0) == offset, f"no document starts at position {start}"
            assert ends[right - 1] == stop, f"no document ends at position {start + stop - offset}"
            numbers.append(documents[left:right])
            lengths.append(np.diff(ends[left:right], prepend=offset))
            start += stop - offset
        return np.concatenate(numbers), np.concatenate(lengths)

    def _block_at(self, position: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the block that contains a stream position.

        The result is the documents' numbers, the documents' ends within the block, and the position within the block.
        """
        epoch, offset = divmod(position, self.tokens_per_epoch)
        turn = 0 if self._seed is None else epoch  # without shuffling all epochs are equal, and share cache entries
        starts = self._blocks(turn).starts
        number = int(starts.searchsorted(offset, side="right")) - 1
        documents, ends = self._block(turn, number)
        return documents, ends, offset - int(starts[number])

    def _gathered(self, epoch: int) -> _Blocks:
        """Shuffle an epoch's shards, and group them into blocks."""
        shards = np.flatnonzero(np.diff(self._boundaries))  # without empty shards
        if self._seed is not None:
            shards = shards[permutation(len(shards), self._seed, "shards", epoch)]
        ends = np.cumsum(self._shard_tokens[shards])
        cuts = [0]
        starts = [0]
        while cuts[-1] < len(shards):
            last = min(int(ends.searchsorted(starts[-1] + self._shuffle_tokens)), len(shards) - 1)
            cuts.append(last + 1)
            starts.append(int(ends[last]))
        if len(cuts) > 2 and 2 * (starts[-1] - starts[-2]) < self._shuffle_tokens:
            del cuts[-2], starts[-2]  # join a small last block with the block before it, to shuffle over both
        return _Blocks(shards, cuts, np.array(starts))

    def _arranged(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a block's documents in order, and each document's end within the block, as int64 arrays."""
        shards, cuts, starts = self._blocks(epoch)
        runs = [self._boundaries[shard : shard + 2].tolist() for shard in shards[cuts[number] : cuts[number + 1]]]
        documents = np.concatenate([np.arange(first, end) for first, end in runs])
        lengths = np.concatenate([self._lengths[first:end] for first, end in runs])
        if self._seed is not None:
            order = permutation(len(documents), self._seed, "documents", epoch, number)
            documents = documents[order]
            lengths = lengths[order]
        ends = np.cumsum(lengths, dtype=np.int64)
        tokens = int(starts[number + 1] - starts[number])
        if ends[-1] != tokens:
            raise ValueError(
                f"the lengths of a block's documents add up to {ends[-1]} tokens, but its shards have {tokens}; run "
                "`hybridtron data verify` on the folder"
            )
        return documents, ends
