"""What the layers of `modeling_hybridtron.py` compute with: in the package, these implementations of its ops.

A folder that is exported has a file of this name with their text instead (`interop/shipped_code`), which is made from
the imports here.
"""

from __future__ import annotations

from hybridtron.ops.attention.blocked import blocked as blocked_attention
from hybridtron.ops.attention.reference import AttentionInputs, AttentionMemory, attention, remember
from hybridtron.ops.conv.reference import ConvInputs, causal_conv
from hybridtron.ops.documents import document_starts
from hybridtron.ops.gated_norm.reference import GatedScaleInputs, GatedSquaresInputs, gated_scale, gated_squares
from hybridtron.ops.norm.reference import RMSNormInputs, rms_norm
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.rope.reference import RopeInputs, apply_rope, rope_table
from hybridtron.ops.scan.chunked import chunked as chunked_selective_scan
from hybridtron.ops.scan.reference import ScanInputs
from hybridtron.ops.span.past import CarriedBlocks, ChoiceRule, SpanPast, choose_at_random, choose_by_relevance
from hybridtron.ops.span.reference import SpanCut, SpanInputs, SpanSegment, span_attention
from hybridtron.ops.ssd.chunked import chunked as chunked_ssd_scan
from hybridtron.ops.ssd.reference import SSDInputs
from hybridtron.ops.swiglu.reference import SwiGLUInputs, swiglu

__all__ = [
    "AttentionInputs", "AttentionMemory", "CarriedBlocks", "ChoiceRule", "ConvInputs", "GatedScaleInputs",
    "GatedSquaresInputs", "RMSNormInputs", "RopeInputs", "SSDInputs", "ScanInputs", "SpanCut", "SpanInputs",
    "SpanPast", "SpanSegment", "SwiGLUInputs", "apply_rope", "at_least_fp32", "attention", "blocked_attention",
    "causal_conv", "choose_at_random", "choose_by_relevance", "chunked_selective_scan", "chunked_ssd_scan",
    "document_starts", "gated_scale", "gated_squares", "remember", "rms_norm", "rope_table", "span_attention",
    "swiglu",
]  # fmt: skip
