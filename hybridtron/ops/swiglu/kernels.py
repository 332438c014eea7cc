"""The gate of a SwiGLU block by Triton: forward and backward each read what they need once and write it once.

    y = g s u,   dg = dy u s (1 + g (1 - s)),   du = dy g s,   s = sigmoid(g),   g = multiplier * gate

Gate and up lie side by side in each row, as the projection before them writes them, and so do their gradients. What is
kept for the backward pass is that input alone. fp32 inside. Unmeasured on a GPU.

Legend: R rows (of any leading axes), F channels of the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch
from hybridtron.ops.swiglu.reference import SwiGLUInputs

BLOCK = 1024  # channels that a program has: 8 to a thread
WARPS = 4


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    """y, with a backward pass."""
    return _Gate.apply(*inputs)


class _Gate(torch.autograd.Function):
    """Keeps the input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, multiplier: float) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.multiplier = multiplier
        return gated(gate_up, multiplier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return gradients(gate_up, grads[0].contiguous(), ctx.multiplier), None


def gated(gate_up: Tensor, multiplier: float) -> Tensor:
    """y."""
    rows, channels = gate_up.numel() // gate_up.shape[-1], gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], channels)
    launch(_forward, (rows, ceil_div(channels, BLOCK)), gate_up, y, channels, multiplier, BLOCK, warps=WARPS)
    return y


def gradients(gate_up: Tensor, grad_y: Tensor, multiplier: float) -> Tensor:
    """Of gate and up."""
    rows, channels = grad_y.numel() // grad_y.shape[-1], grad_y.shape[-1]
    found = torch.empty_like(gate_up)
    grid = rows, ceil_div(channels, BLOCK)
    launch(_backward, grid, gate_up, grad_y, found, channels, multiplier, BLOCK, warps=WARPS)
    return found


@triton.jit
def _forward(gate_up_R2F: tl.tensor, y_RF: tl.tensor, channels: int, multiplier: float, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_F = channel_F < channels
    place = gate_up_R2F + 2 * row * channels + channel_F
    gate_F = multiplier * tl.load(place, there_F, 0.0).to(tl.float32)
    up_F = tl.load(place + channels, there_F, 0.0).to(tl.float32)
    tl.store(y_RF + row * channels + channel_F, gate_F * tl.sigmoid(gate_F) * up_F, there_F)


@triton.jit
def _backward(
    gate_up_R2F: tl.tensor,
    grad_y_RF: tl.tensor,
    found_R2F: tl.tensor,
    channels: int,
    multiplier: float,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_F = channel_F < channels
    start = 2 * row * channels
    gate_F = multiplier * tl.load(gate_up_R2F + start + channel_F, there_F, 0.0).to(tl.float32)
    up_F = tl.load(gate_up_R2F + start + channels + channel_F, there_F, 0.0).to(tl.float32)
    grad_F = tl.load(grad_y_RF + row * channels + channel_F, there_F, 0.0).to(tl.float32)
    share_F = tl.sigmoid(gate_F)
    of_gate_F = multiplier * grad_F * up_F * share_F * (1.0 + gate_F * (1.0 - share_F))
    tl.store(found_R2F + start + channel_F, of_gate_F, there_F)
    tl.store(found_R2F + start + channels + channel_F, grad_F * gate_F * share_F, there_F)
