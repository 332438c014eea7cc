"""The short causal convolution before the recurrence of a state-space layer."""

from hybridtron.ops.conv import causal_conv1d, native, reference, triton
from hybridtron.ops.conv.reference import ConvInputs, next_tail
from hybridtron.ops.dispatch import Op

__all__ = ["ConvInputs", "causal_conv", "next_tail"]

causal_conv = Op(reference.causal_conv, (causal_conv1d.CAUSAL_CONV1D, triton.TRITON, native.NATIVE))
