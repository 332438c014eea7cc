"""The product activation(m * gate) * up in torch; only gate and up are saved for the backward pass.

m is a constant of the model's configuration. Plain autograd would also save activation(m * gate); here the backward
pass recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.multiply import multiply


class Activation(NamedTuple):
    """An elementwise function and its backward pass.

    `backward` takes the output's gradient and the input, and returns the input's gradient.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class _RecomputedGate(torch.autograd.Function):
    """Autograd function that saves only gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, multiplier: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        ctx.multiplier = multiplier
        return activation.forward(multiply(gate, multiplier)).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gate, up) = ctx.saved_tensors
        (grad,) = grads
        activation = ctx.activation
        gate = multiply(gate, ctx.multiplier)
        of_gate = multiply(activation.backward(grad * up, gate), ctx.multiplier)
        return of_gate, activation.forward(gate).mul_(grad), None, None


def gated(gate_up: Tensor, activation: Activation, multiplier: float = 1.0) -> Tensor:
    """Return activation(multiplier * gate) * up; `gate_up` holds gate's channels, then up's channels."""
    return _RecomputedGate.apply(*gate_up.chunk(2, dim=-1), activation, multiplier)
