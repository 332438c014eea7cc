"""activation(gate) * up with its two inputs kept for backward, where plain autograd also keeps activation(gate)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Activation(NamedTuple):
    """A function of each entry, and the gradient of its input from those of its output and the input."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class _RecomputedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation.forward(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), (grad,), activation = ctx.saved_tensors, grads, ctx.activation
        return activation.backward(grad * up, gate), activation.forward(gate).mul_(grad), None


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Of gate and up side by side on the last axis."""
    return _RecomputedGate.apply(*gate_up.chunk(2, dim=-1), activation)
