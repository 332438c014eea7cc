"""Root-mean-square norm (RMSNorm), alone or after an addition to the residual stream."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.norm import native, reference, triton
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs

__all__ = ["AddRMSNormInputs", "RMSNormInputs", "add_rms_norm", "rms_norm"]

rms_norm = Op(reference.rms_norm, (triton.NORM, native.NORM))
add_rms_norm = Op(reference.add_rms_norm, (triton.ADD_NORM, native.ADD_NORM))
