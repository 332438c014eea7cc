"""The elementwise part of GEGLU: gelu(gate) * up."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.geglu import recomputed, reference, triton
from hybridtron.ops.geglu.reference import GEGLUInputs

__all__ = ["GEGLUInputs", "geglu"]

geglu = Op(reference.geglu, (triton.TRITON, recomputed.RECOMPUTED))
