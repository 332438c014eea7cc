"""Triton kernels for the step sizes and log decays of the delta rule, one kernel for each direction (`gates.py`).

torch would launch about twenty kernels instead. A tile is one token with many decays, or several tokens with few
decays. The backward kernel has at most as many programs as an H100 runs at a time. Each program loops over several
tiles, and adds up their contributions to the gradients for dt_bias and A_log. Then `sum_kernels` adds up the programs'
sums. There are no atomics, so results are deterministic. The kernels have run in Triton's interpreter only.

Legend: B rows (sequences in the batch), L tokens, H heads, G decays per head, X = H G, R tokens of all rows (index
b L + t for token t in row b), S programs in the backward kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.delta.gates import DeltaGateInputs
from hybridtron.ops.gla.kernels_gates import place_of_tokens
from hybridtron.ops.kernel_launch import (
    ceil_div,
    empty_in_order,
    last_side_by_side,
    launch,
    power_of_2,
    programs_at_once,
    strided,
    tile_of_rows,
)
from hybridtron.ops.scan.kernels import sigmoid, softplus
from hybridtron.ops.sum_kernels import sum_of_parts

TILE = 512  # decays per tile; a token with more is a tile of its own
WARP_DECAYS = 128  # decays per warp: 4 per thread
# warps of the backward kernel that a multiprocessor runs at a time, with at most 128 registers a thread
RESIDENT_WARPS = 16


def delta_gates(inputs: DeltaGateInputs) -> tuple[Tensor, Tensor]:
    """Return beta and g, contiguous and in fp32."""
    return _DeltaGates.apply(*inputs)  # type: ignore[return-value]


class _DeltaGates(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, a_BLX: Tensor, b_BLH: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        dt_bias_X, A_log_H, reach = parameters
        inputs = DeltaGateInputs(last_side_by_side(a_BLX), last_side_by_side(b_BLH), dt_bias_X, A_log_H, reach)
        ctx.save_for_backward(*inputs[:-1])
        ctx.reach = reach
        rows, length, decays = a_BLX.shape
        heads = len(A_log_H)
        beta_BLH = a_BLX.new_empty(rows, length, heads, dtype=torch.float32)
        g_BLHG = a_BLX.new_empty(rows, length, heads, decays // heads, dtype=torch.float32)
        tile, warps = _tile(decays, heads)
        grid = (ceil_div(rows * length, tile[0]),)
        launch(forward_gates, grid, *_arguments(inputs), beta_BLH, g_BLHG, *_sizes(inputs), *tile, warps=warps)
        return beta_BLH, g_BLHG

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbeta_BLH: Tensor, dg_BLHG: Tensor) -> tuple[Tensor | None, ...]:
        a_BLX, b_BLH, dt_bias_X, A_log_H = ctx.saved_tensors
        inputs = DeltaGateInputs(a_BLX, b_BLH, dt_bias_X, A_log_H, ctx.reach)
        rows, length, decays = a_BLX.shape
        heads = len(A_log_H)
        da_BLX = empty_in_order(a_BLX)
        db_BLH = empty_in_order(b_BLH)
        tile, warps = _tile(decays, heads)
        programs = min(ceil_div(rows * length, tile[0]), programs_at_once(warps, RESIDENT_WARPS))
        sums_2SX = dg_BLHG.new_empty(2, programs, decays)
        launch(
            backward_gates, (programs,), *_arguments(inputs), dbeta_BLH.contiguous(), dg_BLHG.contiguous(),
            *strided(da_BLX, db_BLH), sums_2SX, *_sizes(inputs), *tile, warps=warps,
        )  # fmt: skip
        of_bias_X, of_A_log_X = sum_of_parts(sums_2SX, torch.float32)
        if decays > heads:
            of_A_log_H = of_A_log_X.view(heads, -1).sum(1)
        else:
            of_A_log_H = of_A_log_X
        return da_BLX, db_BLH, of_bias_X.to(dt_bias_X.dtype), of_A_log_H.to(A_log_H.dtype), None


def _arguments(inputs: DeltaGateInputs) -> tuple[Any, ...]:
    """Return the kernels' first arguments: logits with their strides, and parameters."""
    return *strided(inputs.a_BLX, inputs.b_BLH), inputs.dt_bias_X.contiguous(), inputs.A_log_H.contiguous()


def _sizes(inputs: DeltaGateInputs) -> tuple[Any, ...]:
    """Return arguments of both kernels: reach, the number of tokens in all rows, L, X, H and G."""
    rows, length, decays = inputs.a_BLX.shape
    heads = len(inputs.A_log_H)
    return inputs.reach, rows * length, length, decays, heads, decays // heads


def _tile(decays: int, heads: int) -> tuple[tuple[int, int, int], int]:
    """Return a tile's tokens, decays and heads, the last two rounded up to powers of two; and a program's warps."""
    tokens, block, warps = tile_of_rows(decays, TILE, WARP_DECAYS)
    return (tokens, block, power_of_2(heads)), warps


@triton.jit
def forward_gates(
    a_ptr: tl.tensor, a_row: int, a_token: int, b_ptr: tl.tensor, b_row: int, b_token: int, bias_ptr: tl.tensor,
    A_log_ptr: tl.tensor, beta_ptr: tl.tensor, g_ptr: tl.tensor, reach: float, tokens: int, length: int, decays: int,
    heads: int, group: int, TOKENS: tl.constexpr, DECAYS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store beta and g for TOKENS tokens. Grid: (tiles of tokens,)."""
    token_R = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there_R1 = tl.expand_dims(token_R < tokens, 1)
    x = tl.arange(0, DECAYS)
    wanted_RX = there_R1 & (x < decays)[None, :]
    bias_X = tl.load(bias_ptr + x, x < decays, 0.0).to(tl.float32)
    rate_X = tl.exp(tl.load(A_log_ptr + x // group, x < decays, 0.0).to(tl.float32))
    a_RX = tl.load(a_ptr + place_of_tokens(token_R, length, a_row, a_token) + x[None, :], wanted_RX, 0.0).to(tl.float32)
    g_RX = -rate_X[None, :] * softplus(a_RX + bias_X[None, :])
    tl.store(g_ptr + tl.expand_dims(token_R * decays, 1) + x[None, :], g_RX, wanted_RX)
    h = tl.arange(0, HEADS)
    wanted_RH = there_R1 & (h < heads)[None, :]
    b_RH = tl.load(b_ptr + place_of_tokens(token_R, length, b_row, b_token) + h[None, :], wanted_RH, 0.0).to(tl.float32)
    tl.store(beta_ptr + tl.expand_dims(token_R * heads, 1) + h[None, :], reach * sigmoid(b_RH), wanted_RH)


@triton.jit
def backward_gates(
    a_ptr: tl.tensor, a_row: int, a_token: int, b_ptr: tl.tensor, b_row: int, b_token: int, bias_ptr: tl.tensor,
    A_log_ptr: tl.tensor, dbeta_ptr: tl.tensor, dg_ptr: tl.tensor, da_ptr: tl.tensor, da_row: int, da_token: int,
    db_ptr: tl.tensor, db_row: int, db_token: int, sums_ptr: tl.tensor, reach: float, tokens: int, length: int,
    decays: int, heads: int, group: int, TOKENS: tl.constexpr, DECAYS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store da and db, and each program's sums for dt_bias and A_log. Grid: (S programs,).

    Program p computes the tiles p, p + S, p + 2 * S and so on.
    """
    program = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, DECAYS)
    h = tl.arange(0, HEADS)
    bias_X = tl.load(bias_ptr + x, x < decays, 0.0).to(tl.float32)
    rate_X = tl.exp(tl.load(A_log_ptr + x // group, x < decays, 0.0).to(tl.float32))
    of_bias_RX = tl.zeros([TOKENS, DECAYS], tl.float32)
    of_A_log_RX = tl.zeros([TOKENS, DECAYS], tl.float32)
    for turn in range(tl.cdiv(tl.cdiv(tokens, TOKENS) - tl.program_id(0), tl.num_programs(0))):
        token_R = (program + turn * tl.num_programs(0)) * TOKENS + tl.arange(0, TOKENS)
        there_R1 = tl.expand_dims(token_R < tokens, 1)
        wanted_RX = there_R1 & (x < decays)[None, :]
        wanted_RH = there_R1 & (h < heads)[None, :]
        a_RX = tl.load(a_ptr + place_of_tokens(token_R, length, a_row, a_token) + x[None, :], wanted_RX, 0.0)
        dg_RX = tl.load(dg_ptr + tl.expand_dims(token_R * decays, 1) + x[None, :], wanted_RX, 0.0)
        b_RH = tl.load(b_ptr + place_of_tokens(token_R, length, b_row, b_token) + h[None, :], wanted_RH, 0.0)
        dbeta_RH = tl.load(dbeta_ptr + tl.expand_dims(token_R * heads, 1) + h[None, :], wanted_RH, 0.0)
        shifted_RX = a_RX.to(tl.float32) + bias_X[None, :]
        scaled_RX = -rate_X[None, :] * dg_RX
        da_RX = scaled_RX * sigmoid(shifted_RX)
        tl.store(da_ptr + place_of_tokens(token_R, length, da_row, da_token) + x[None, :], da_RX, wanted_RX)
        of_bias_RX += da_RX
        of_A_log_RX += scaled_RX * softplus(shifted_RX)
        gate_RH = sigmoid(b_RH.to(tl.float32))
        db_RH = dbeta_RH * reach * gate_RH * (1.0 - gate_RH)
        tl.store(db_ptr + place_of_tokens(token_R, length, db_row, db_token) + h[None, :], db_RH, wanted_RH)
    place_X = program * decays + x
    tl.store(sums_ptr + place_X, tl.sum(of_bias_RX, axis=0), x < decays)
    second = tl.num_programs(0) * decays
    tl.store(sums_ptr + second + place_X, tl.sum(of_A_log_RX, axis=0), x < decays)
