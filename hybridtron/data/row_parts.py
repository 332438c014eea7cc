"""Reading sequence shards: a rank's tokens in rows that several ranks divide (`parallel/context.py`).

From every chunk in a lane's row, a rank reads its own shard and one more token, the last token's label. It must also
know where documents begin and end in the full chunk, which is known before a token is read.

Letters: B rows, L tokens in a shard, T = L + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from hybridtron.data.batch import Batch, RowShare
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.order.stream import RowSpans, Span
from hybridtron.data.rows import RowArrays, gather


class RowPart(NamedTuple):
    """A rank's sequence shard: number `rank` when a row is divided into `ranks` equal parts."""

    rank: int = 0
    ranks: int = 1


WHOLE = RowPart()


@dataclass(frozen=True)
class PartOfRow:
    """A chunk's sequence shard: where its tokens are stored, and its place in the full chunk.

    row: spans that hold its tokens, and the token after them
    number: index of its first document among those in the lane's row
    spans, behind, unbroken: as in `RowShare`, for one row
    continues: as in `Batch`
    """

    row: RowSpans
    number: int
    spans: list[tuple[int, int]]
    behind: int
    unbroken: bool
    continues: bool


def part_of_row(row: RowSpans, begin: int, length: int, part: RowPart, joined: bool) -> PartOfRow:
    """Compute a rank's shard in a chunk, which has `length` tokens from place `begin` in a lane's row.

    joined: whether the row counts as one document
    """
    share = length // part.ranks
    first = begin + part.rank * share
    end = begin + length
    stop = first + share
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
    return PartOfRow(
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
    """Cut a span that begins at place `start`, keeping the places from `first` to before `stop`."""
    source, span = placed
    skipped = max(0, first - start)
    return source, Span(span.document, span.first + skipped, min(start + span.count, stop) - start - skipped)


class PartsRead(NamedTuple):
    """A step's rows. If they are sequence shards, `parts` gives their places in the full rows; otherwise it is None."""

    rows: RowArrays
    parts: list[PartOfRow] | None = None


def gather_parts(sources: Sequence[DocumentStore], parts: list[PartOfRow], dtype: np.dtype, joined: bool) -> PartsRead:
    """Read the tokens for shards with equal length."""
    rows = gather(sources, [part.row for part in parts], dtype, joined)
    numbers_B1 = np.array([[part.number] for part in parts], rows.documents_BT.dtype)
    continues_B = np.array([part.continues for part in parts])
    rows = rows._replace(documents_BT=rows.documents_BT + numbers_B1, continues_B=continues_B)
    return PartsRead(rows, parts)


def with_share(batch: Batch, parts: Sequence[PartOfRow], part: RowPart) -> Batch:
    """Attach sequence shards to their batch, with the boundaries in full rows.

    The ranks' process group is set later.
    """
    share = RowShare(
        part.ranks,
        part.rank,
        None,
        [piece.spans for piece in parts],
        batch.tokens_BL.shape[1],
        torch.tensor([piece.behind for piece in parts], device=batch.tokens_BL.device),
        torch.tensor([piece.unbroken for piece in parts], device=batch.tokens_BL.device),
    )
    return replace(batch, seq=replace(batch.seq, share=share)).with_boundaries()
