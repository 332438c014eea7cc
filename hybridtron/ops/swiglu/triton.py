"""SwiGLU's gate by Triton kernels of our own (`kernels`). Unmeasured on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.swiglu.reference import SwiGLUInputs


def _unsupported_reason(inputs: SwiGLUInputs) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile joins the reference to what stands around it"
    return "the kernels have no float64" if inputs.gate_up.dtype == torch.float64 else None


class _TritonGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from hybridtron.ops.swiglu import kernels

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return kernels.gated(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from hybridtron.ops.swiglu import kernels

        (gate_up,) = ctx.saved_tensors
        return kernels.gradients(gate_up, grads[0].contiguous())


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    return _TritonGate.apply(inputs.gate_up)


TRITON = Implementation("triton", swiglu, "cuda", "triton", _unsupported_reason)
