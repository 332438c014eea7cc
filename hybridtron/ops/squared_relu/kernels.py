"""Triton kernels for squared ReLU: each kernel reads its inputs once and writes its output once.

    y = r^2,   grad x = 2 r grad y,   r = max(x, 0)

Only x is saved for the backward pass. Numbers are computed in fp32. The kernels have run in Triton's interpreter only.

Legend: N values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch
from hybridtron.ops.squared_relu.reference import SquaredReLUInputs

BLOCK = 2048  # values per program: 16 per thread
WARPS = 4


def squared_relu(inputs: SquaredReLUInputs) -> Tensor:
    """Return relu(x)^2, with a gradient for x."""
    return _SquaredReLU.apply(inputs.x)


class _SquaredReLU(torch.autograd.Function):
    """Autograd function that saves only x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _launch(_forward, x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        _launch(_backward, x, grads[0].contiguous(), grad_x)
        return grad_x


def _launch(kernel: Any, x: Tensor, *tensors: Tensor) -> None:
    launch(kernel, (ceil_div(x.numel(), BLOCK),), x, *tensors, x.numel(), BLOCK, warps=WARPS)


@triton.jit
def _forward(x_N: tl.tensor, y_N: tl.tensor, values: int, BLOCK: tl.constexpr) -> None:
    """Store y of one block. Grid: blocks."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + n, n < values, 0.0).to(tl.float32)
    relu = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    tl.store(y_N + n, relu * relu, n < values)


@triton.jit
def _backward(x_N: tl.tensor, grad_y_N: tl.tensor, grad_x_N: tl.tensor, values: int, BLOCK: tl.constexpr) -> None:
    """Store the gradient of x in one block. Grid: blocks."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + n, n < values, 0.0).to(tl.float32)
    grad = tl.load(grad_y_N + n, n < values, 0.0).to(tl.float32)
    tl.store(grad_x_N + n, tl.where(x < 0.0, 0.0, 2.0 * x * grad), n < values)
