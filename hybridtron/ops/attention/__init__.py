"""Causal softmax attention."""

from hybridtron.ops.attention import blocked, native, reference
from hybridtron.ops.attention.reference import AttentionInputs, AttentionMemory, joined, remember
from hybridtron.ops.attention.table import TABLE
from hybridtron.ops.dispatch import Op

__all__ = ["AttentionInputs", "AttentionMemory", "attention", "joined", "remember"]

attention = Op(
    reference.attention,
    (*(row.implementation for row in TABLE), native.NATIVE, blocked.BLOCKED),
)
