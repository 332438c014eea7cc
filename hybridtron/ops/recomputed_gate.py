"""activation(m gate) * up in torch, with only gate and up saved for backward; m is a multiplier of the configuration.

Plain autograd would also save activation(m gate); here backward computes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.multiplied import multiplied


class Activation(NamedTuple):
    """An elementwise function, and its backward: (gradient of the output, input) to the gradient of the input."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class _RecomputedGate(torch.autograd.Function):
    """Autograd function that saves only gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, multiplier: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        ctx.multiplier = multiplier
        return activation.forward(multiplied(gate, multiplier)).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gate, up) = ctx.saved_tensors
        (grad,) = grads
        activation = ctx.activation
        gate = multiplied(gate, ctx.multiplier)
        of_gate = multiplied(activation.backward(grad * up, gate), ctx.multiplier)
        return of_gate, activation.forward(gate).mul_(grad), None, None


def gated(gate_up: Tensor, activation: Activation, multiplier: float = 1.0) -> Tensor:
    """Return activation(multiplier * gate) * up; `gate_up` holds gate and up side by side on its last axis."""
    return _RecomputedGate.apply(*gate_up.chunk(2, dim=-1), activation, multiplier)
