"""Triton kernels for the log decays of gated linear attention, one kernel for each direction (`gates.py`).

log(sigmoid(v)) is -softplus(-v). A tile is one token with many channels, or several tokens with few channels. The
backward kernel has at most as many programs as an H100 runs at a time. Each program loops over several tiles, and adds
up their contributions to the bias's gradient. Then `sum_kernels` adds up the programs' sums. There are no atomics, so
results are deterministic. The kernels have run in Triton's interpreter only.

Legend: B rows (sequences in the batch), L tokens, K key channels of all heads, R tokens of all rows (index b L + t for
token t in row b), S programs in the backward kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.gla.gates import GLAGateInputs
from hybridtron.ops.kernel_launch import (
    ceil_div,
    empty_in_order,
    last_side_by_side,
    launch,
    programs_at_once,
    strided,
    tile_of_rows,
)
from hybridtron.ops.scan.kernels import sigmoid, softplus
from hybridtron.ops.sum_kernels import sum_of_parts

TILE = 1024  # channels per tile; a token with more channels is a tile of its own
WARP_CHANNELS = 256  # channels per warp: 8 per thread
RESIDENT_WARPS = 32  # warps of the backward kernel that a multiprocessor runs at a time


def gla_gates(inputs: GLAGateInputs) -> Tensor:
    """Return g, contiguous and in fp32."""
    return _GLAGates.apply(*inputs)


class _GLAGates(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, a_BLK: Tensor, bias_K: Tensor, divisor: float) -> Tensor:
        a_BLK = last_side_by_side(a_BLK)
        bias_K = bias_K.contiguous()
        ctx.save_for_backward(a_BLK, bias_K)
        ctx.divisor = divisor
        rows, length, channels = a_BLK.shape
        g_BLK = a_BLK.new_empty(rows, length, channels, dtype=torch.float32)
        tokens, block, warps = tile_of_rows(channels, TILE, WARP_CHANNELS)
        launch(
            forward_gates, (ceil_div(rows * length, tokens),), *strided(a_BLK), bias_K, g_BLK, divisor, rows * length,
            length, channels, tokens, block, warps=warps,
        )  # fmt: skip
        return g_BLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg_BLK: Tensor) -> tuple[Tensor | None, ...]:
        a_BLK, bias_K = ctx.saved_tensors
        rows, length, channels = a_BLK.shape
        da_BLK = empty_in_order(a_BLK)
        tokens, block, warps = tile_of_rows(channels, TILE, WARP_CHANNELS)
        programs = min(ceil_div(rows * length, tokens), programs_at_once(warps, RESIDENT_WARPS))
        sums_1SK = bias_K.new_empty(1, programs, channels, dtype=torch.float32)
        launch(
            backward_gates, (programs,), *strided(a_BLK), bias_K, dg_BLK.contiguous(), *strided(da_BLK), sums_1SK,
            ctx.divisor, rows * length, length, channels, tokens, block, warps=warps,
        )  # fmt: skip
        return da_BLK, sum_of_parts(sums_1SK, bias_K.dtype).squeeze(0), None


@triton.jit
def place_of_tokens(token_R: tl.tensor, length: int, row_stride: int, token_stride: int) -> tl.tensor:
    """Return the offset of each token in a tensor with these strides, as a column (R, 1)."""
    return tl.expand_dims(token_R // length * row_stride + token_R % length * token_stride, 1)


@triton.jit
def forward_gates(
    a_ptr: tl.tensor, a_row: int, a_token: int, bias_ptr: tl.tensor, g_ptr: tl.tensor, divisor: float, tokens: int,
    length: int, channels: int, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store g for TOKENS tokens. Grid: (tiles of tokens,)."""
    token_R = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, CHANNELS)
    wanted_RK = tl.expand_dims(token_R < tokens, 1) & (k < channels)[None, :]
    bias_K = tl.load(bias_ptr + k, k < channels, 0.0).to(tl.float32)
    a_RK = tl.load(a_ptr + place_of_tokens(token_R, length, a_row, a_token) + k[None, :], wanted_RK, 0.0)
    g_RK = -softplus(-(a_RK.to(tl.float32) + bias_K[None, :])) / divisor
    tl.store(g_ptr + tl.expand_dims(token_R * channels, 1) + k[None, :], g_RK, wanted_RK)


@triton.jit
def backward_gates(
    a_ptr: tl.tensor, a_row: int, a_token: int, bias_ptr: tl.tensor, dg_ptr: tl.tensor, da_ptr: tl.tensor, da_row: int,
    da_token: int, sums_ptr: tl.tensor, divisor: float, tokens: int, length: int, channels: int, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store da, and each program's sum for the bias. Grid: (S programs,).

    Program p computes the tiles p, p + S, p + 2 * S and so on.
    """
    program = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, CHANNELS)
    bias_K = tl.load(bias_ptr + k, k < channels, 0.0).to(tl.float32)
    sums_RK = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for turn in range(tl.cdiv(tl.cdiv(tokens, TOKENS) - tl.program_id(0), tl.num_programs(0))):
        token_R = (program + turn * tl.num_programs(0)) * TOKENS + tl.arange(0, TOKENS)
        wanted_RK = tl.expand_dims(token_R < tokens, 1) & (k < channels)[None, :]
        a_RK = tl.load(a_ptr + place_of_tokens(token_R, length, a_row, a_token) + k[None, :], wanted_RK, 0.0)
        dg_RK = tl.load(dg_ptr + tl.expand_dims(token_R * channels, 1) + k[None, :], wanted_RK, 0.0)
        da_RK = dg_RK * sigmoid(-(a_RK.to(tl.float32) + bias_K[None, :])) / divisor
        tl.store(da_ptr + place_of_tokens(token_R, length, da_row, da_token) + k[None, :], da_RK, wanted_RK)
        sums_RK += da_RK
    tl.store(sums_ptr + program * channels + k, tl.sum(sums_RK, axis=0), k < channels)
