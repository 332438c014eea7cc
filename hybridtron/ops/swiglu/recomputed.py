"""SwiGLU that keeps its two inputs for backward, where plain autograd also keeps silu(gate)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.swiglu.reference import SwiGLUInputs


class _RecomputedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    return _RecomputedGate.apply(*inputs.gate_up.chunk(2, dim=-1))


RECOMPUTED = Implementation("recomputed", swiglu)
