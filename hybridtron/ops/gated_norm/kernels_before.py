"""Triton kernels for the norm before a gate; `reference.py` has the equations.

A tile is one head at several tokens. The forward kernel computes a tile per program. The backward kernel has as many
programs as an H100 runs at the same time. Each program loops over tiles of one head, and adds up their contributions
to dweight. Then `sum_kernels` adds up the programs' sums. Both kernels read their inputs once, recompute the norm, and
compute in fp32. There are no atomics, so results are deterministic. The kernels have run in Triton's interpreter only.

Legend: B rows (sequences in the batch), L tokens per row, H heads, P channels per head, S programs among which a head's
tiles are divided, T tokens in a tile. Tokens are numbered over all rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.gated_norm.kernels import silu
from hybridtron.ops.gated_norm.reference import NormBeforeGateInputs
from hybridtron.ops.kernel_launch import (
    ceil_div,
    empty_in_order,
    heads_side_by_side,
    launch,
    programs_at_once,
    strided,
    tile_of_rows,
)
from hybridtron.ops.sum_kernels import sum_of_parts

TILE = 2048  # maximum elements per tile; a tile is larger only if a single token of a head has more channels
WARP_VALUES = 256  # elements per warp: 8 per thread
RESIDENT_WARPS = 24  # warps of `_backward` that a multiprocessor runs at a time, with REGISTERS registers per thread
REGISTERS = 80


def norm_before_gate(inputs: NormBeforeGateInputs) -> Tensor:
    """Return the norm times the gate. Gradients with respect to y, z and the weight are supported."""
    return _NormBeforeGate.apply(*inputs)


class _NormBeforeGate(torch.autograd.Function):
    """Autograd function for `norm_before_gate`. It saves y, z and the weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor, weight: Tensor, eps: float, sigmoid: bool) -> Tensor:
        y_BLHP = heads_side_by_side(y_BLHP)
        z_BLHP = heads_side_by_side(z_BLHP)
        weight = weight.contiguous()
        ctx.save_for_backward(y_BLHP, z_BLHP, weight)
        ctx.constants = eps, sigmoid
        rows, length, heads, size = y_BLHP.shape
        out_BLHP = empty_in_order(z_BLHP)
        tokens, block, warps = tile_of_rows(size, TILE, WARP_VALUES)
        launch(
            _forward, (ceil_div(rows * length, tokens), heads), *strided(y_BLHP, z_BLHP, out_BLHP), weight,
            _of_head(weight), eps, rows * length, length, size, sigmoid, tokens, block, warps=warps,
        )  # fmt: skip
        return out_BLHP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_BLHP, z_BLHP, weight = ctx.saved_tensors
        eps, sigmoid = ctx.constants
        grad_y = empty_in_order(y_BLHP)
        grad_z = empty_in_order(z_BLHP)
        rows, length, heads, size = y_BLHP.shape
        tokens, block, warps = tile_of_rows(size, TILE, WARP_VALUES)
        shares = max(1, programs_at_once(warps, RESIDENT_WARPS) // heads)
        shares = min(shares, ceil_div(rows * length, tokens))
        sums_SHP = y_BLHP.new_empty(shares, heads, size, dtype=torch.float32)
        launch(
            _backward, (shares, heads), *strided(y_BLHP, z_BLHP, heads_side_by_side(grads[0]), grad_y, grad_z),
            weight, _of_head(weight), sums_SHP, eps, rows * length, length, size, sigmoid, tokens, block,
            warps=warps, registers=REGISTERS,
        )  # fmt: skip
        grad_weight = sum_of_parts(sums_SHP.view(1, -1, weight.numel()), weight.dtype)
        return grad_y, grad_z, grad_weight.view_as(weight), None, None


def _of_head(weight: Tensor) -> int:
    """Return the distance between the weights of neighboring heads: 0 if all heads share the weight."""
    return 0 if weight.dim() == 1 else weight.shape[1]


@triton.jit
def _places(
    token_T: tl.tensor, length: int, row_stride: int, token_stride: int, head: tl.tensor, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the offsets (T, P) of a head's channels, for tokens that are numbered over all rows."""
    of_token_T = token_T // length * row_stride + token_T % length * token_stride
    return of_token_T[:, None] + (head * SIZE + tl.arange(0, BLOCK))[None, :]


@triton.jit
def _gate(z: tl.tensor, SIGMOID: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the gate and its derivative at z."""
    if SIGMOID:
        share = tl.sigmoid(z)
        return share, share * (1.0 - share)
    return silu(z)


@triton.jit
def _forward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, out_ptr: tl.tensor,
    out_row: int, out_token: int, weight_ptr: tl.tensor, weight_head: int, eps: float, tokens: int, length: int,
    SIZE: tl.constexpr, SIGMOID: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the output for a tile. Grid: (tiles of all rows' tokens, heads)."""
    head = tl.program_id(1)
    token_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    p = tl.arange(0, BLOCK)
    inside = (token_T < tokens)[:, None] & (p < SIZE)[None, :]
    y = tl.load(y_ptr + _places(token_T, length, y_row, y_token, head, SIZE, BLOCK), inside, 0.0).to(tl.float32)
    z = tl.load(z_ptr + _places(token_T, length, z_row, z_token, head, SIZE, BLOCK), inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + head * weight_head + p, p < SIZE, 0.0).to(tl.float32)
    scale_T = 1.0 / tl.sqrt_rn(tl.sum(y * y, 1) / SIZE + eps)
    gate, _ = _gate(z, SIGMOID)
    out = y * scale_T[:, None] * weight[None, :] * gate
    tl.store(out_ptr + _places(token_T, length, out_row, out_token, head, SIZE, BLOCK), out, inside)


@triton.jit
def _backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, grad_ptr: tl.tensor,
    grad_row: int, grad_token: int, grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int, grad_z_ptr: tl.tensor,
    grad_z_row: int, grad_z_token: int, weight_ptr: tl.tensor, weight_head: int, sums_ptr: tl.tensor, eps: float,
    tokens: int, length: int, SIZE: tl.constexpr, SIGMOID: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store dy and dz for one head in every S-th tile, and the sum over these tiles for dweight. Grid: (S, heads)."""
    head = tl.program_id(1)
    p = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + head * weight_head + p, p < SIZE, 0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((TOKENS, BLOCK), tl.float32)
    for turn in range(tl.cdiv(tokens - tl.program_id(0) * TOKENS, tl.num_programs(0) * TOKENS)):
        tile = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        token_T = tile * TOKENS + tl.arange(0, TOKENS)
        inside = (token_T < tokens)[:, None] & (p < SIZE)[None, :]
        y = tl.load(y_ptr + _places(token_T, length, y_row, y_token, head, SIZE, BLOCK), inside, 0.0).to(tl.float32)
        z = tl.load(z_ptr + _places(token_T, length, z_row, z_token, head, SIZE, BLOCK), inside, 0.0).to(tl.float32)
        at_grad = _places(token_T, length, grad_row, grad_token, head, SIZE, BLOCK)
        grad = tl.load(grad_ptr + at_grad, inside, 0.0).to(tl.float32)
        scale_T = 1.0 / tl.sqrt_rn(tl.sum(y * y, 1) / SIZE + eps)
        normed = y * scale_T[:, None]
        gate, slope = _gate(z, SIGMOID)
        at_z = _places(token_T, length, grad_z_row, grad_z_token, head, SIZE, BLOCK)
        tl.store(grad_z_ptr + at_z, grad * normed * weight * slope, inside)
        of_weight += grad * gate * normed
        of_normed = grad * gate * weight
        mean_T = tl.sum(of_normed * normed, 1) / SIZE
        at_y = _places(token_T, length, grad_y_row, grad_y_token, head, SIZE, BLOCK)
        tl.store(grad_y_ptr + at_y, (of_normed - normed * mean_T[:, None]) * scale_T[:, None], inside)
    at = (tl.program_id(0) * tl.num_programs(1) + head) * SIZE + p
    tl.store(sums_ptr + at, tl.sum(of_weight, 0), p < SIZE)
