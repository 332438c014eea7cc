"""Triton kernels that move rows to experts and back; `permutation.py` and `gathered.py` have the equations.

A program handles some tokens with all their channels, and loops over a token's K places. So each kernel reads and
writes every row once, and a sum over K is always added in the same order, without atomics. Numbers are computed in
fp32. The kernels have run in Triton's interpreter only.

Legend: T tokens, K experts per token, N = T K choices, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.experts.permutation import FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.kernel_launch import ceil_div, launch, tile_of_rows

ELEMENTS = 2048  # per program
WARP_ELEMENTS = 512  # 16 per thread


def to_experts(inputs: ToExpertsInputs) -> Tensor:
    """Return one row per choice (N, D), in the order of experts, with gradients for the tokens."""
    return _KernelToExperts.apply(inputs.x_TD, inputs.order.place_TK, inputs.order.slots)


def from_experts(inputs: FromExpertsInputs) -> Tensor:
    """Return each token's weighted sum of its rows (T, D), with gradients for rows and weights."""
    return _KernelFromExperts.apply(inputs.rows_ND, inputs.weights_TK, inputs.order.place_TK, inputs.order.slots)


class _KernelToExperts(torch.autograd.Function):
    """Autograd function that saves only places."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, place_TK: Tensor, slots: int | None) -> Tensor:
        ctx.save_for_backward(place_TK)
        x_TD = x_TD.contiguous()
        if slots is None:
            rows_ND = x_TD.new_empty(place_TK.numel(), x_TD.shape[1])
        else:
            rows_ND = x_TD.new_zeros(slots, x_TD.shape[1])
        _launch(_copy, x_TD, place_TK, x_TD, rows_ND)
        return rows_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return _summed(grads[0].contiguous(), None, place_TK), None, None


class _KernelFromExperts(torch.autograd.Function):
    """Autograd function that saves rows, weights and places."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_TK: Tensor, place_TK: Tensor, slots: int | None) -> Tensor:
        ctx.slots = slots
        rows_ND = rows_ND.contiguous()
        weights_TK = weights_TK.contiguous()
        ctx.save_for_backward(rows_ND, weights_TK, place_TK)
        return _summed(rows_ND, weights_TK, place_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_ND, weights_TK, place_TK = ctx.saved_tensors
        grad_TD = grads[0].contiguous()
        if ctx.slots is None:
            grad_rows_ND = torch.empty_like(rows_ND)
        else:
            grad_rows_ND = torch.zeros_like(rows_ND)
        grad_weights_TK = torch.empty_like(weights_TK)
        _launch(_spread, grad_TD, place_TK, grad_TD, rows_ND, weights_TK, grad_rows_ND, grad_weights_TK)
        return grad_rows_ND, grad_weights_TK, None, None


def _summed(rows_ND: Tensor, weights_TK: Tensor | None, place_TK: Tensor) -> Tensor:
    y_TD = rows_ND.new_empty(len(place_TK), rows_ND.shape[1])
    _launch(_add, y_TD, place_TK, rows_ND, weights_TK, y_TD)
    return y_TD


def _launch(kernel: Any, x_TD: Tensor, place_TK: Tensor, *tensors: Tensor | None) -> None:
    """Run one program per tile of tokens; `x_TD` has the tokens' sizes."""
    tokens, channels = x_TD.shape
    rows, block, warps = tile_of_rows(channels, ELEMENTS, WARP_ELEMENTS)
    grid = (ceil_div(tokens, rows),)
    launch(kernel, grid, place_TK, *tensors, tokens, channels, place_TK.shape[1], rows, block, warps=warps)


@triton.jit
def _copy(
    place_TK: tl.tensor, x_TD: tl.tensor, rows_ND: tl.tensor, tokens: int, channels: int, K: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile's tokens at their K places. Grid: tiles of tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, CHANNELS)
    inside = (t < tokens)[:, None] & (d < channels)[None, :]
    x = tl.load(x_TD + t[:, None] * channels + d[None, :], inside, 0.0)
    for k in tl.static_range(K):
        place_T = tl.load(place_TK + t * K + k, t < tokens, 0)
        tl.store(rows_ND + place_T[:, None] * channels + d[None, :], x, inside)


@triton.jit
def _add(
    place_TK: tl.tensor, rows_ND: tl.tensor, weights_TK: tl.tensor, y_TD: tl.tensor, tokens: int, channels: int,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sums of a tile's tokens; the weights are 1 if `weights_TK` is None. Grid: tiles of tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, CHANNELS)
    inside = (t < tokens)[:, None] & (d < channels)[None, :]
    y = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for k in tl.static_range(K):
        place_T = tl.load(place_TK + t * K + k, t < tokens, 0)
        row = tl.load(rows_ND + place_T[:, None] * channels + d[None, :], inside, 0.0).to(tl.float32)
        if weights_TK is not None:
            row = row * tl.load(weights_TK + t * K + k, t < tokens, 0.0)[:, None]
        y += row
    tl.store(y_TD + t[:, None] * channels + d[None, :], y, inside)


@triton.jit
def _spread(
    place_TK: tl.tensor, grad_TD: tl.tensor, rows_ND: tl.tensor, weights_TK: tl.tensor, grad_rows_ND: tl.tensor,
    grad_weights_TK: tl.tensor, tokens: int, channels: int, K: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of a tile's rows and weights. Grid: tiles of tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, CHANNELS)
    inside = (t < tokens)[:, None] & (d < channels)[None, :]
    grad = tl.load(grad_TD + t[:, None] * channels + d[None, :], inside, 0.0).to(tl.float32)
    for k in tl.static_range(K):
        place_T = tl.load(place_TK + t * K + k, t < tokens, 0)
        at = place_T[:, None] * channels + d[None, :]
        row = tl.load(rows_ND + at, inside, 0.0).to(tl.float32)
        weight_T = tl.load(weights_TK + t * K + k, t < tokens, 0.0)
        tl.store(grad_rows_ND + at, grad * weight_T[:, None], inside)
        tl.store(grad_weights_TK + t * K + k, tl.sum(grad * row, 1), t < tokens)
