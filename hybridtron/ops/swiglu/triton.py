"""SwiGLU's gate by Triton kernels of our own (`kernels`). Unmeasured on a GPU."""

from __future__ import annotations

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.swiglu.reference import SwiGLUInputs


def _unsupported_reason(inputs: SwiGLUInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    return "the kernels have no float64" if inputs.gate_up.dtype == torch.float64 else None


TRITON = own_kernels("hybridtron.ops.swiglu.kernels:swiglu", _unsupported_reason)
