"""Span-expanded attention (SE-Attn)."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.span import blocked, flex, native, reference
from hybridtron.ops.span.past import CarriedBlocks, ChoiceRule, SpanPast, choose_at_random, choose_by_relevance
from hybridtron.ops.span.reference import SpanCut, SpanInputs, SpanSegment

__all__ = [
    "CarriedBlocks", "ChoiceRule", "SpanCut", "SpanInputs", "SpanPast", "SpanSegment", "choose_at_random",
    "choose_by_relevance", "span_attention",
]  # fmt: skip

span_attention = Op(reference.span_attention, (native.NATIVE, blocked.BLOCKED, flex.FLEX))
