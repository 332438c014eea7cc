"""Shared code for the gated MLPs' Triton kernels, which compute activation(gate) * up and its gradient.

The input `gate_up` is the output of one fused projection. Its last axis holds F channels for gate, then F channels for
up. The gradient of `gate_up` has the same layout. Only `gate_up` is saved for the backward pass. The kernels compute in
fp32. The files `swiglu/kernels.py` and `geglu/kernels.py` contain the kernels and their equations.

Legend: R rows (all leading axes flattened), F channels for gate and for up, 2F channels in `gate_up`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch

BLOCK = 1024  # channels per program: 8 per thread
WARPS = 4


class GateKernels(NamedTuple):
    """The forward and backward kernels of a gated MLP. `numbers` are the op's constants. The kernels' arguments:

    forward    gate_up (input), y (output), F, the constants, BLOCK
    backward   gate_up (input), grad_y (input), grad_gate_up (output), F, the constants, BLOCK
    """

    forward: Any
    backward: Any
    numbers: tuple[float, ...] = ()


def gated(gate_up: Tensor, kernels: GateKernels) -> Tensor:
    """Return activation(gate) * up, differentiable in gate_up."""
    return _Gate.apply(gate_up, kernels)


class _Gate(torch.autograd.Function):
    """Autograd function that saves only gate_up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: GateKernels) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _launch(kernels.forward, kernels.numbers, y.shape, gate_up, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad_y = grads[0].contiguous()
        grad_gate_up = torch.empty_like(gate_up)
        _launch(ctx.kernels.backward, ctx.kernels.numbers, grad_y.shape, gate_up, grad_y, grad_gate_up)
        return grad_gate_up, None


def _launch(kernel: Any, numbers: tuple[float, ...], shape: torch.Size, *tensors: Tensor) -> None:
    rows = shape[:-1].numel()
    channels = shape[-1]
    launch(kernel, (rows, ceil_div(channels, BLOCK)), *tensors, channels, *numbers, BLOCK, warps=WARPS)


@triton.jit
def load_pair(gate_up_R2F: tl.tensor, channels: int, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Load gate and up for this program's row and BLOCK channels; return them in fp32."""
    channel_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = gate_up_R2F + 2 * tl.program_id(0).to(tl.int64) * channels + channel_F
    gate_F = tl.load(place, channel_F < channels, 0.0).to(tl.float32)
    up_F = tl.load(place + channels, channel_F < channels, 0.0).to(tl.float32)
    return gate_F, up_F


@triton.jit
def store_pair(
    grad_gate_up_R2F: tl.tensor, of_gate_F: tl.tensor, of_up_F: tl.tensor, channels: int, BLOCK: tl.constexpr
) -> None:
    """Store the gradients of gate and up for this program's row and channels, in the layout that `load_pair` reads."""
    channel_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = grad_gate_up_R2F + 2 * tl.program_id(0).to(tl.int64) * channels + channel_F
    tl.store(place, of_gate_F, channel_F < channels)
    tl.store(place + channels, of_up_F, channel_F < channels)


@triton.jit
def load_one(grad_y_RF: tl.tensor, channels: int, BLOCK: tl.constexpr) -> tl.tensor:
    """Load this program's row and channels from a tensor (R, F); return them in fp32."""
    channel_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = grad_y_RF + tl.program_id(0).to(tl.int64) * channels + channel_F
    return tl.load(place, channel_F < channels, 0.0).to(tl.float32)


@triton.jit
def store_one(y_RF: tl.tensor, y_F: tl.tensor, channels: int, BLOCK: tl.constexpr) -> None:
    """Store this program's row and channels in a tensor (R, F)."""
    channel_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_RF + tl.program_id(0).to(tl.int64) * channels + channel_F, y_F, channel_F < channels)
