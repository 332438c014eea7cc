"""The gated norm of Mamba-2, as one op and as two steps."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.gated_norm import native, reference, triton
from hybridtron.ops.gated_norm.reference import GatedNormInputs, GatedScaleInputs, GatedSquaresInputs

__all__ = [
    "GatedNormInputs",
    "GatedScaleInputs",
    "GatedSquaresInputs",
    "gated_norm",
    "gated_scale",
    "gated_squares",
]

gated_norm = Op(reference.gated_norm, (triton.NORM, native.NORM))
gated_squares = Op(reference.gated_squares, (triton.SQUARES, native.SQUARES))
gated_scale = Op(reference.gated_scale, (triton.SCALE, native.SCALE))
