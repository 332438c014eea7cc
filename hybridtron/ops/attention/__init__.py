"""Causal softmax attention."""

from hybridtron.ops.attention import blocked, flash_attn, flex, native, reference, sdpa
from hybridtron.ops.attention.reference import AttentionInputs, AttentionMemory, joined, remember
from hybridtron.ops.dispatch import Op

__all__ = ["AttentionInputs", "AttentionMemory", "attention", "joined", "remember"]

attention = Op(
    reference.attention,
    (*flash_attn.FASTEST_FIRST, sdpa.SDPA, flex.FLEX, native.NATIVE, blocked.BLOCKED),
)
