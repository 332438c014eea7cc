"""The gate of a SwiGLU block.

    y = silu(gate) * up,   silu(g) = g * sigmoid(g)

Only the elementwise part: the projections before and after it belong to the mixer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import op


@op
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the dtype of the inputs."""
    return F.silu(gate) * up


class _RecomputedGate(torch.autograd.Function):
    """SwiGLU that keeps its two inputs for backward, where plain autograd also keeps silu(gate)."""

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


@swiglu.form("recomputed")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _RecomputedGate.apply(gate, up)
