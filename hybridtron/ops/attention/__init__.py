"""Causal softmax attention."""

from hybridtron.ops.attention import blocked, flash_attn, flex, reference, sdpa
from hybridtron.ops.attention.reference import AttentionInputs, AttentionMemory, remember
from hybridtron.ops.dispatch import Op

__all__ = ["AttentionInputs", "AttentionMemory", "attention", "remember"]

attention = Op(reference.attention, (flash_attn.FLASH_ATTN, sdpa.SDPA, flex.FLEX, blocked.BLOCKED))
