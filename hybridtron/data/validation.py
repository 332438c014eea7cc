"""The held-out rows: segments spread evenly over each source's validation split, the same at every evaluation.

The start of a split would not do. Documents there keep their inputs' order, and an evaluation has time only for the
first few. Their losses may differ from the average by more than hours of training change.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridtron.config.schema import Documents
from hybridtron.data.batch import Batch
from hybridtron.data.order.stream import DocumentStream, RowSpans
from hybridtron.data.rows import batch_of, gather
from hybridtron.data.sources import Sources


def held_out(
    sources: Sources, documents: Documents, seq_len: int, tokens: int, micro_batch: int, piece: int
) -> Iterator[tuple[str, Batch]]:
    """Yield batches from one source each, with its name: about `tokens` tokens in total, divided by weight.

    piece: tokens in a segment, the longest row of this evaluation

    Every seq_len reads rows from the same segments, so that losses at several lengths can be compared. If seq_len does
    not divide a segment, the segment's rest is left out. Raises ValueError if no split has enough tokens for a row.
    """
    stores = sources.stores("validation")
    mixture = sources.having("validation")
    total_weight = sum(source.weight for source in mixture)
    num_rows = 0
    for index, (store, source) in enumerate(zip(stores, mixture, strict=True)):
        stream = DocumentStream(store)
        begins = _begins(source.tokens("validation") - 1, int(source.weight / total_weight * tokens), seq_len, piece)
        rows = [RowSpans([(index, span) for span in stream.spans(begin, seq_len + 1)], position=0) for begin in begins]
        num_rows += len(rows)
        for first in range(0, len(rows), micro_batch):
            gathered = gather(stores, rows[first : first + micro_batch], sources.dtype, documents is Documents.join)
            yield source.name, batch_of(gathered, documents)
    if not num_rows:
        raise ValueError(f"no validation split has the {seq_len + 1} tokens of one row")


def _begins(available: int, tokens: int, seq_len: int, piece: int) -> list[int]:
    """Return where rows begin in a split with `available` tokens.

    The split is divided into as many equal parts as there are segments, with a segment in the middle of each.
    """
    piece = piece if piece <= available else seq_len
    pieces = available // piece
    num_begins = min(max(1, tokens // piece), pieces)
    begins = [(2 * number + 1) * pieces // (2 * num_begins) * piece for number in range(num_begins)]
    return [begin + row * seq_len for begin in begins for row in range(piece // seq_len)]
