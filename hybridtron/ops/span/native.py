"""Span-expanded attention by C++ compiled for this CPU (`native/attention.h`).

In span-expanded attention a token sees its chunk's tokens up to itself, and the earlier blocks that were chosen for its
chunk (`reference`). The compiled code reads the chosen keys and values in place, without a copy. The inputs, the
output, and one log-sum-exp for each query and head are saved for the backward pass. A chunk is computed in pieces. A
piece is at most `most_queries()` consecutive queries from one chunk in one row.

A segment is a range of tokens in R consecutive rows; in each of these rows the range is in one document.

Legend: B rows (sequences in a batch), R rows in a segment, L tokens per row, S keys per row (S - L kept keys of the
row's first document, then the row's own L keys), H query heads, G key/value heads, K head size, T chunks in a segment,
C slots for chosen blocks per chunk, P pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.attention import AttentionPlan, attend, most_queries
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.tensors import unsupported_types
from hybridtron.ops.span.reference import SpanInputs, chunk_spans


def _unsupported_reason(inputs: SpanInputs) -> str | None:
    return unsupported_types(*inputs[:3])


@untraced  # the keys to read depend on the values of tensors, so torch.compile can't trace this
def span_attention(inputs: SpanInputs) -> Tensor:
    """Return every query's attention output (B, L, H, K)."""
    return attend(*inputs[:3], plan_of(inputs))


NATIVE = Implementation("native", span_attention, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


def plan_of(inputs: SpanInputs) -> AttentionPlan:
    """Return the plan that the compiled code executes. A plan contains:

    pieces    (P, 5), sorted by the first column; the columns are the piece's row in the batch, its first query, its
              number of queries, the index in `table` of its chunk's first line, and the number of blocks chosen for
              its chunk
    begins    (B + 1,): the index of each row's first piece, then P
    first     (B, L): for each query, the index of the first key in its own chunk
    table     C lines for each row and chunk of a segment, a column for each key/value head; an entry is the index of a
              chosen block's first key, or -1 for an empty slot
    block     tokens per block
    """
    q_BLHK, k_BSGK, _, cut, chosen = inputs
    (rows, length) = q_BLHK.shape[:2]
    total = k_BSGK.shape[1]
    first_BL = torch.zeros(rows, length, dtype=torch.int64)
    pieces: list[tuple[int, ...]] = []
    tables = [torch.zeros(0, k_BSGK.shape[2], dtype=torch.int64)]
    place = 0
    for segment, chosen_RGTC in zip(cut.segments, chosen, strict=True):
        most = 0 if chosen_RGTC is None else chosen_RGTC.shape[-1]
        spans = list(chunk_spans(cut, segment, total - length, most))
        for number, span in enumerate(spans):
            first_BL[segment.rows, span.queries] = span.keys.start
            for start in range(span.queries.start, span.queries.stop, most_queries()):
                count = min(most_queries(), span.queries.stop - start)
                for row in range(segment.rows.start, segment.rows.stop):
                    chunk = (row - segment.rows.start) * len(spans) + number
                    pieces.append((row, start, count, place + chunk * most, span.count))
        if chosen_RGTC is not None:
            begin = segment.keys(length, total).start
            starts_RGTC = torch.where(chosen_RGTC < 0, -1, begin + chosen_RGTC * cut.block)
            tables.append(starts_RGTC.permute(0, 2, 3, 1).flatten(0, 2))
            place += len(tables[-1])
    pieces_P5 = torch.tensor(sorted(pieces), dtype=torch.int64)
    begins = torch.searchsorted(pieces_P5[:, 0].contiguous(), torch.arange(rows + 1))
    return AttentionPlan(pieces_P5, begins, first_BL, torch.cat(tables).contiguous(), cut.block)
