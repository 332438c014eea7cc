"""Mamba-2's gated norm, as one op or as two ops, and a norm before a gate."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.gated_norm import native, reference, separate, triton
from hybridtron.ops.gated_norm.reference import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    NormBeforeGateInputs,
)

__all__ = [
    "GatedNormInputs",
    "GatedScaleInputs",
    "GatedSquaresInputs",
    "NormBeforeGateInputs",
    "gated_norm",
    "gated_scale",
    "gated_squares",
    "norm_before_gate",
]

gated_norm = Op(reference.gated_norm, (triton.NORM, native.NORM))
gated_squares = Op(reference.gated_squares, (triton.SQUARES, native.SQUARES))
gated_scale = Op(reference.gated_scale, (triton.SCALE, native.SCALE))
norm_before_gate = Op(reference.norm_before_gate, (triton.BEFORE_GATE, separate.SEPARATE))
