"""The elementwise part of SwiGLU: silu(multiplier * gate) * up."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.swiglu import native, recomputed, reference, triton
from hybridtron.ops.swiglu.reference import SwiGLUInputs

__all__ = ["SwiGLUInputs", "swiglu"]

swiglu = Op(reference.swiglu, (triton.TRITON, native.NATIVE, recomputed.RECOMPUTED))
