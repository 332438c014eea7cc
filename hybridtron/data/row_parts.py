"""What one of several ranks reads of rows whose tokens are shared out over them (`parallel/context.py`).

Of every chunk of a lane's row it reads the tokens of its own share, and one more, which is the label of the last. What
it must know of the whole chunk is where documents begin and end in it, and that is known before a token is read.

Legend: S tokens of a chunk, T = S + 1.
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
    """Which of `ranks` equal shares of a row's tokens, in order, a rank has."""

    rank: int = 0
    ranks: int = 1


WHOLE = RowPart()


@dataclass(frozen=True)
class PartOfRow:
    """A share of a chunk: where its tokens and the next one are, and what is known of the whole chunk.

    number: of the share's first document, among those of the lane's row. Spans, behind and unbroken as in `RowShare`,
    continues as in `Batch`.
    """

    row: RowSpans
    number: int
    spans: list[tuple[int, int]]
    behind: int
    unbroken: bool
    continues: bool


def part_of_row(row: RowSpans, begin: int, length: int, part: RowPart, joined: bool) -> PartOfRow:
    """Of the chunk of `length` tokens from place `begin` of a lane's row on."""
    share = length // part.ranks
    first, end = begin + part.rank * share, begin + length
    stop = first + share
    ends = list(accumulate(span.count for _, span in row.spans))
    starts = [0, *ends[:-1]]
    own = [index for index in range(len(ends)) if starts[index] <= stop and ends[index] > first]
    number = own[0]
    document = (0, ends[-1]) if joined else (starts[number], ends[number])  # that of the share's first token
    documents = [(0, ends[-1])] if joined else list(zip(starts, ends, strict=True))
    position = first - document[0] + (row.position if document[0] == 0 else 0)
    return PartOfRow(
        RowSpans([_between(row.spans[index], starts[index], first, stop + 1) for index in own], position),
        0 if joined else number,
        [(max(a, begin) - begin, min(b, end) - begin) for a, b in documents if a < end and b > begin],
        first - max(document[0], begin),
        document[1] >= stop,
        row.position > 0 if begin == 0 else joined or begin not in starts,
    )


def _between(placed: tuple[int, Span], start: int, first: int, stop: int) -> tuple[int, Span]:
    """Of a span that begins at place `start`, what lies from place `first` to before `stop`."""
    source, span = placed
    skipped = max(0, first - start)
    return source, Span(span.document, span.first + skipped, min(start + span.count, stop) - start - skipped)


class PartsRead(NamedTuple):
    """The rows of a step, of which `parts` says what of the whole rows these are; None: they are whole."""

    rows: RowArrays
    parts: list[PartOfRow] | None = None


def gather_parts(sources: Sequence[DocumentStore], parts: list[PartOfRow], dtype: np.dtype, joined: bool) -> PartsRead:
    """Read the tokens of shares that are all of one length."""
    rows = gather(sources, [part.row for part in parts], dtype, joined)
    numbers_B1 = np.array([[part.number] for part in parts], rows.documents_BT.dtype)
    continues_B = np.array([part.continues for part in parts])
    rows = rows._replace(documents_BT=rows.documents_BT + numbers_B1, continues_B=continues_B)
    return PartsRead(rows, parts)


def with_share(batch: Batch, parts: Sequence[PartOfRow], part: RowPart) -> Batch:
    """A batch of such shares, with what layers ask of the whole rows; the ranks' group is not known here."""
    share = RowShare(
        part.ranks,
        part.rank,
        None,
        [one.spans for one in parts],
        batch.tokens_BL.shape[1],
        torch.tensor([one.behind for one in parts], device=batch.tokens_BL.device),
        torch.tensor([one.unbroken for one in parts], device=batch.tokens_BL.device),
    )
    return replace(batch, seq=replace(batch.seq, share=share)).bordered()
