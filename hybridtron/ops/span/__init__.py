"""Span-expanded attention (SE-Attn): attention inside chunks and to selected blocks of the past."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.span import flex, native, reference
from hybridtron.ops.span.choice import query_sums, summaries
from hybridtron.ops.span.past import (
    CarriedBlocks,
    ChoiceRule,
    SpanPast,
    Whole,
    behind,
    choose_at_random,
    choose_by_relevance,
    known_of,
    own_blocks,
)
from hybridtron.ops.span.reference import SpanCut, SpanInputs, SpanSegment

__all__ = [
    "CarriedBlocks", "ChoiceRule", "SpanCut", "SpanInputs", "SpanPast", "SpanSegment", "Whole", "behind",
    "choose_at_random", "choose_by_relevance", "known_of", "own_blocks", "query_sums", "span_attention", "summaries",
]  # fmt: skip

span_attention = Op(reference.span_attention, (native.NATIVE, flex.FLEX))
