"""Rows for the held-out loss, cut from segments that are spread evenly over each source's validation split.

A row is one sequence of a batch. Every evaluation of a run reads the same rows. A split's documents keep the input
files' order, and an evaluation has time for a few documents only. If it read only the start of the split, its loss
would be biased: the first documents may have another mean loss than the full split. The difference can be larger than
the progress of hours of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridtron.config.schema import Documents
from hybridtron.data.batch import Batch
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.order.stream import DocumentStream, RowSpans
from hybridtron.data.rows import batch_of, gather
from hybridtron.data.sources import Sources


@dataclass(frozen=True)
class HeldOutBatch:
    """A batch with rows from one source's validation split. The tokens are not in memory until `read` is called.

    source: the source's name
    rows: the document spans of each row
    stores: all sources' documents, to which the rows' source indices refer
    dtype: the tokens' dtype
    documents: the treatment of documents that share a row, as in the configuration
    """

    source: str
    rows: Sequence[RowSpans]
    stores: Sequence[DocumentStore]
    dtype: np.dtype
    documents: Documents

    def read(self) -> Batch:
        """Read the rows' tokens, and return the batch on the CPU."""
        gathered = gather(self.stores, self.rows, self.dtype, self.documents is Documents.join)
        return batch_of(gathered, self.documents)


def held_out(
    sources: Sources, documents: Documents, seq_len: int, tokens: int, micro_batch: int, piece: int
) -> list[HeldOutBatch]:
    """Choose the rows for an evaluation, in batches from one source each.

    seq_len: tokens per row, without the label after the last token
    tokens: approximate token count in total, which is divided among the sources by weight
    micro_batch: maximum number of rows per batch
    piece: tokens per segment; the longest seq_len that the evaluation uses

    An evaluation at several lengths calls this function with different seq_len and the same `piece`. Rows of every
    length then come from the same segments, so that the losses of different lengths can be compared. A split that is
    shorter than `piece` is an exception: its segments have seq_len tokens. If a segment's length is not a multiple of
    seq_len, the segment's last tokens are not read. Raises ValueError if no source's validation split has enough tokens
    for a row.
    """
    stores = sources.stores("validation")
    mixture = sources.having("validation")
    total_weight = sum(source.weight for source in mixture)
    batches = []
    for index, (store, source) in enumerate(zip(stores, mixture, strict=True)):
        stream = DocumentStream(store)
        begins = _begins(source.tokens("validation") - 1, int(source.weight / total_weight * tokens), seq_len, piece)
        rows = [RowSpans([(index, span) for span in stream.spans(begin, seq_len + 1)], position=0) for begin in begins]
        for first in range(0, len(rows), micro_batch):
            chosen = rows[first : first + micro_batch]
            batches.append(HeldOutBatch(source.name, chosen, stores, dtype=sources.dtype, documents=documents))
    if not batches:
        raise ValueError(f"no source's validation split has {seq_len + 1} tokens, which one row takes")
    return batches


def _begins(available: int, tokens: int, seq_len: int, piece: int) -> list[int]:
    """Return the token index at which each row begins in a split.

    available: the split's token count less one, because the split's last token can only be a label
    tokens: approximate number of tokens to read from the split

    Segments have `piece` tokens, or seq_len tokens if `available` is less than `piece`. To read n segments, the split
    is divided into n equal parts, and the segment in the middle of each part is read.
    """
    piece = piece if piece <= available else seq_len
    pieces = available // piece
    num_begins = min(max(1, tokens // piece), pieces)
    begins = [(2 * number + 1) * pieces // (2 * num_begins) * piece for number in range(num_begins)]
    return [begin + row * seq_len for begin in begins for row in range(piece // seq_len)]
