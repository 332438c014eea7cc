"""GEGLU that keeps its two inputs for backward, where plain autograd also keeps gelu(gate)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.geglu.reference import GEGLUInputs


class _RecomputedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        return torch.ops.aten.gelu_backward(grad * up, gate), F.gelu(gate).mul_(grad)


def geglu(inputs: GEGLUInputs) -> Tensor:
    return _RecomputedGelu.apply(*inputs.gate_up.chunk(2, dim=-1))


RECOMPUTED = Implementation("recomputed", geglu)
