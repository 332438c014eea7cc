"""SwiGLU's gate by Triton kernels of our own (`kernels`). Unmeasured on a GPU."""

from __future__ import annotations

import torch

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.swiglu.reference import SwiGLUInputs


def _unsupported_reason(inputs: SwiGLUInputs) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile joins the reference to what stands around it"
    return "the kernels have no float64" if inputs.gate_up.dtype == torch.float64 else None


TRITON = own_kernels("hybridtron.ops.swiglu.kernels:swiglu", _unsupported_reason)
