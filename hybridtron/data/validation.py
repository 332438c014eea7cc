"""The held-out rows: from the start of each source's validation split, in its own order, never shuffled."""

from __future__ import annotations

from collections.abc import Iterator

from hybridtron.config.schema import Documents
from hybridtron.data.batch import Batch
from hybridtron.data.order.stream import DocumentStream
from hybridtron.data.rows import Row, batch_of, gather
from hybridtron.data.sources import Sources


def held_out(sources: Sources, documents: Documents, seq_len: int, tokens: int, micro_batch: int) -> Iterator[Batch]:
    """About `tokens` of the sources' validation splits, each from its start on in its own order, by weight.

    Every seq_len reads the same text, up to a row for each source, so that losses at several lengths can be compared.
    """
    rows: list[Row] = []
    stores, ingredients = sources.stores("validation"), sources.having("validation")
    whole = sum(one.weight for one in ingredients)
    for index, (store, one) in enumerate(zip(stores, ingredients, strict=True)):
        available = (one.tokens("validation") - 1) // seq_len
        wanted = min(max(1, int(one.weight / whole * tokens) // seq_len), available)
        stream = DocumentStream.of(store)
        spans = [stream.spans(row * seq_len, seq_len + 1) for row in range(wanted)]
        rows += [Row([(index, span) for span in of_row], position=0) for of_row in spans]
    if not rows:
        raise ValueError(f"no validation split has the {seq_len + 1} tokens of one row")
    for first in range(0, len(rows), micro_batch):
        yield batch_of(
            gather(stores, rows[first : first + micro_batch], sources.dtype, documents is Documents.join), documents
        )
