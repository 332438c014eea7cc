"""Span-expanded attention compiled for this CPU (`native/attention.h`): chosen blocks are read in place.

Nothing is gathered: besides inputs and output it keeps one log-sum-exp for each query and head.

Legend as in `reference`; P pieces, N places of chosen blocks.
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


@untraced  # document boundaries decide which keys are read
def span_attention(inputs: SpanInputs) -> Tensor:
    """Compute attention in pieces of chunks, over the chosen blocks and the chunk's own tokens."""
    return attend(*inputs[:3], plan_of(inputs))


NATIVE = Implementation("native", span_attention, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


def plan_of(inputs: SpanInputs) -> AttentionPlan:
    """Return the compiled form's plan: the pieces of all chunks, and the first keys of their chosen blocks."""
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
