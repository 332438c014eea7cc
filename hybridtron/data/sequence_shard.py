"""Reads sequence shards: with context parallelism, the ranks in a group divide each row's tokens.

A lane is one row index in the batch. In a step, a lane reads one or several chunks with seq_len tokens each. Each chunk
is divided into equal shards, one for each rank. A rank reads its shard's tokens, and the next token, which is the label
for the shard's last token. A rank also needs to know where documents begin and end in the full chunk. This follows from
the row's spans, so the rank reads no tokens from other shards.

Suffixes in array names give the axes: B rows, L tokens in a shard, T = L + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from hybridtron.data.batch import Batch, SequenceShard
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.order.stream import RowSpans, Span
from hybridtron.data.rows import RowArrays, gather


class ShardIndex(NamedTuple):
    """Index of a rank's sequence shard, and the number of shards in a row."""

    rank: int = 0
    ranks: int = 1


UNSHARDED = ShardIndex()


@dataclass(frozen=True)
class RowShard:
    """One rank's shard in one chunk.

    row: document spans with the shard's tokens and the next token
    number: index of the shard's first document among the documents in the lane's row
    spans: each document's (begin, end) token indices in the full chunk
    behind: how many tokens before the shard in the chunk belong to the same document as the shard's first token
    unbroken: whether all tokens in the shard belong to one document
    continues: whether the chunk's first token belongs to the same document as the token before the chunk
    """

    row: RowSpans
    number: int
    spans: list[tuple[int, int]]
    behind: int
    unbroken: bool
    continues: bool


def shard_of_row(row: RowSpans, begin: int, length: int, shard_index: ShardIndex, joined: bool) -> RowShard:
    """Compute a rank's shard in a chunk.

    row: all tokens that the lane reads in a step
    begin, length: row index at which the chunk begins, and the chunk's length in tokens
    joined: whether the row counts as one document
    """
    shard_length = length // shard_index.ranks
    first = begin + shard_index.rank * shard_length
    end = begin + length
    stop = first + shard_length
    ends = list(accumulate(span.count for _, span in row.spans))
    starts = [0, *ends[:-1]]
    indices = [index for index in range(len(ends)) if starts[index] <= stop and ends[index] > first]
    number = indices[0]
    # the document of the shard's first token
    if joined:
        document = (0, ends[-1])
        documents = [(0, ends[-1])]
    else:
        document = (starts[number], ends[number])
        documents = list(zip(starts, ends, strict=True))
    position = first - document[0] + (row.position if document[0] == 0 else 0)
    return RowShard(
        RowSpans([_between(row.spans[index], starts[index], first, stop + 1) for index in indices], position),
        0 if joined else number,
        [
            (max(document_start, begin) - begin, min(document_end, end) - begin)
            for document_start, document_end in documents
            if document_start < end and document_end > begin
        ],
        first - max(document[0], begin),
        document[1] >= stop,
        row.position > 0 if begin == 0 else joined or begin not in starts,
    )


def _between(placed: tuple[int, Span], start: int, first: int, stop: int) -> tuple[int, Span]:
    """Return the part of a span whose row indices are at least `first` and below `stop`.

    placed: the source's index, and the span
    start: row index at which the span begins
    """
    source, span = placed
    skipped = max(0, first - start)
    return source, Span(span.document, span.first + skipped, min(start + span.count, stop) - start - skipped)


class StepRows(NamedTuple):
    """A step's rows.

    shards: the shard that each row holds; None if rows are not divided among ranks
    """

    rows: RowArrays
    shards: list[RowShard] | None = None


def gather_shards(sources: Sequence[DocumentStore], shards: list[RowShard], dtype: np.dtype, joined: bool) -> StepRows:
    """Read tokens for shards with equal length, each as one row."""
    rows = gather(sources, [shard.row for shard in shards], dtype, joined)
    numbers_B1 = np.array([[shard.number] for shard in shards], rows.documents_BT.dtype)
    continues_B = np.array([shard.continues for shard in shards])
    rows = rows._replace(documents_BT=rows.documents_BT + numbers_B1, continues_B=continues_B)
    return StepRows(rows, shards)


def with_shard(batch: Batch, shards: Sequence[RowShard], shard_index: ShardIndex) -> Batch:
    """Return a copy of the batch with `SeqInfo.shard` set. The ranks' process group is still None."""
    shard = SequenceShard(
        shard_index.ranks,
        shard_index.rank,
        None,
        [row_shard.spans for row_shard in shards],
        batch.tokens_BL.shape[1],
        torch.tensor([row_shard.behind for row_shard in shards], device=batch.tokens_BL.device),
        torch.tensor([row_shard.unbroken for row_shard in shards], device=batch.tokens_BL.device),
    )
    return replace(batch, seq=replace(batch.seq, shard=shard)).with_boundaries()
