"""Causal attention by torch's scaled_dot_product_attention, on CUDA, without window, documents or memory."""

from __future__ import annotations

from hybridtron.ops.attention.reference import AttentionInputs, attend_to_rows
from hybridtron.ops.dispatch import Implementation


def _unsupported_reason(inputs: AttentionInputs) -> str | None:
    if inputs.window is not None and inputs.window < inputs.q_BLHK.shape[1]:
        return "takes no window"
    if inputs.documents_BL is None and inputs.memory is None:
        return None
    return "takes neither documents nor memory"


SDPA = Implementation("sdpa", attend_to_rows, "cuda", unsupported_reason=_unsupported_reason)
