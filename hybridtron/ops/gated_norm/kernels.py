"""Triton kernels for the gated norm, as one op (`gated_norm`) and as two ops (`gated_squares`, `gated_scale`).

    v = y silu(z),   out = v r weight,   r = 1 / sqrt(mean(v^2) + eps), with the mean over a group's channels
    dv = r (dout weight - v r^2 mean(dout weight v)),   dweight = sum over tokens of dout v r
    dy = dv silu(z),   dz = dv y silu'(z)

These equations are for `gated_norm`; `reference.py` has the other two ops' equations. Each kernel reads its inputs
once, recomputes v, and computes in fp32.

The weight's gradient is a sum over all tokens. Therefore a program of `_norm_backward` or `_scale_backward` loops over
every S-th token, and stores the sum over these tokens. `sum_kernels` adds up the S sums. In the other kernels, a
program computes one channel group, or several heads, of a single token. There are no atomics, so results are
deterministic.

`gated_squares` and `gated_scale` were checked on an H200 (benchmarks/gpu.md). `gated_norm` was checked there only in an
earlier version, which had fewer warps per group.

Legend: B rows (sequences in the batch), L tokens per row, E channels, H heads, P channels per head, S programs among
which all tokens are divided.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.gated_norm.reference import GatedNormInputs, GatedScaleInputs, GatedSquaresInputs
from hybridtron.ops.kernel_launch import (
    ceil_div,
    empty_in_order,
    heads_side_by_side,
    last_side_by_side,
    launch,
    power_of_2,
    programs_at_once,
    strided,
)
from hybridtron.ops.sum_kernels import sum_of_parts

# For `gated_squares` and `gated_scale`:
VALUES = 1024  # channels per program: 8 per thread
WARPS = 4  # warps per program
# For `gated_norm`:
WARP_VALUES = 256  # channels per warp: 8 per thread
MOST_WARPS = 16  # maximum warps per group; in groups of more than 4096 channels, a thread has more than 8 channels
RESIDENT_WARPS = 24  # warps of `_norm_backward` that a multiprocessor runs at a time, with 80 registers per thread
# For `_scale_backward`:
SHARES = 528  # maximum S: 4 programs per multiprocessor of an H100; fixed, so that all GPUs add in the same order


def gated_norm(inputs: GatedNormInputs) -> Tensor:
    """Return the gated norm. Gradients with respect to y, z and the weight are supported."""
    return _GatedNorm.apply(*inputs)


def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    """Return each head's sum of v^2 (B, L, H). Gradients with respect to y and z are supported."""
    return _Squares.apply(*inputs)


def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    """Return v * scale * weight. Gradients with respect to all inputs are supported."""
    return _Scale.apply(*inputs)


class _GatedNorm(torch.autograd.Function):
    """Autograd function for `gated_norm`. It saves y, z and the weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, y_BLE: Tensor, z_BLE: Tensor, weight_E: Tensor, groups: int, eps: float) -> Tensor:
        y_BLE = last_side_by_side(y_BLE)
        z_BLE = last_side_by_side(z_BLE)
        weight_E = weight_E.contiguous()
        ctx.save_for_backward(y_BLE, z_BLE, weight_E)
        ctx.groups = groups
        ctx.eps = eps
        rows, length, channels = y_BLE.shape
        out = empty_in_order(y_BLE)
        size = channels // groups
        launch(
            _norm, (length, rows, groups), *strided(y_BLE, z_BLE), weight_E, *strided(out), eps, size,
            power_of_2(size), warps=_warps_of_group(size),
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_BLE, z_BLE, weight_E = ctx.saved_tensors
        grad = last_side_by_side(grads[0])
        rows, length, channels = y_BLE.shape
        grad_y = empty_in_order(y_BLE)
        grad_z = empty_in_order(z_BLE)
        size = channels // ctx.groups
        warps = _warps_of_group(size)
        shares = min(max(1, programs_at_once(warps, RESIDENT_WARPS) // ctx.groups), rows * length)
        sums_SE = weight_E.new_empty(shares, channels, dtype=torch.float32)
        launch(
            _norm_backward, (shares, ctx.groups), *strided(y_BLE, z_BLE), weight_E, *strided(grad, grad_y, grad_z),
            sums_SE, ctx.eps, rows, length, channels, size, power_of_2(size),
            warps=warps, registers=80 if size <= WARP_VALUES * MOST_WARPS else 128,
        )  # fmt: skip
        grad_weight_E = sum_of_parts(sums_SE.unsqueeze(0), weight_E.dtype).squeeze(0)
        return grad_y, grad_z, grad_weight_E, None, None


class _Squares(torch.autograd.Function):
    """Autograd function for `gated_squares`. It saves y and z for the backward pass."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
        y_BLHP = heads_side_by_side(y_BLHP)
        z_BLHP = heads_side_by_side(z_BLHP)
        ctx.save_for_backward(y_BLHP, z_BLHP)
        squares_BLH = y_BLHP.new_empty(y_BLHP.shape[:3], dtype=torch.float32)
        launch(_squares, _grid(y_BLHP), *strided(y_BLHP, z_BLHP), squares_BLH, *_sizes(y_BLHP), warps=WARPS)
        return squares_BLH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        y_BLHP, z_BLHP = ctx.saved_tensors
        grad_y = empty_in_order(y_BLHP)
        grad_z = empty_in_order(z_BLHP)
        launch(
            _squares_backward, _grid(y_BLHP), *strided(y_BLHP, z_BLHP), grads[0].float().contiguous(),
            *strided(grad_y, grad_z), *_sizes(y_BLHP), warps=WARPS,
        )  # fmt: skip
        return grad_y, grad_z


class _Scale(torch.autograd.Function):
    """Autograd function for `gated_scale`. It saves its inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor, scale_BLH: Tensor, weight_HP: Tensor) -> Tensor:
        y_BLHP = heads_side_by_side(y_BLHP)
        z_BLHP = heads_side_by_side(z_BLHP)
        scale_BLH = scale_BLH.contiguous()
        weight_HP = weight_HP.contiguous()
        ctx.save_for_backward(y_BLHP, z_BLHP, scale_BLH, weight_HP)
        out = empty_in_order(y_BLHP)
        launch(
            _scale, _grid(y_BLHP), *strided(y_BLHP, z_BLHP), scale_BLH, weight_HP, *strided(out),
            *_sizes(y_BLHP), warps=WARPS,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        y_BLHP, z_BLHP, scale_BLH, weight_HP = ctx.saved_tensors
        grad = heads_side_by_side(grads[0])
        rows, length, heads, size = y_BLHP.shape
        grad_y = empty_in_order(y_BLHP)
        grad_z = empty_in_order(z_BLHP)
        grad_scale = torch.empty_like(scale_BLH)
        shares = min(SHARES, rows * length)
        sums_SHP = weight_HP.new_empty(shares, heads, size, dtype=torch.float32)
        launch(
            _scale_backward, (shares, _grid(y_BLHP)[2]), *strided(y_BLHP, z_BLHP), scale_BLH, weight_HP,
            *strided(grad, grad_y, grad_z), grad_scale, sums_SHP, rows, *_sizes(y_BLHP), warps=WARPS,
        )  # fmt: skip
        grad_weight = sum_of_parts(sums_SHP.flatten(1).unsqueeze(0), weight_HP.dtype)
        return grad_y, grad_z, grad_scale, grad_weight.view_as(weight_HP)


def _warps_of_group(size: int) -> int:
    """Return the warps per group: one per WARP_VALUES channels, but at most MOST_WARPS."""
    return min(MOST_WARPS, max(1, power_of_2(size) // WARP_VALUES))


def _heads_of_program(size: int) -> int:
    """Return the heads per program: as many as fit into VALUES channels, at least one."""
    return max(1, VALUES // power_of_2(size))


def _grid(y_BLHP: Tensor) -> tuple[int, int, int]:
    rows, length, heads, size = y_BLHP.shape
    return length, rows, ceil_div(heads, _heads_of_program(size))


def _sizes(y_BLHP: Tensor) -> tuple[int, ...]:
    """Return the kernels' last arguments: L, H, P, P padded to a power of two, and heads per program."""
    _, length, heads, size = y_BLHP.shape
    return length, heads, size, power_of_2(size), _heads_of_program(size)


@triton.jit
def silu(z: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return silu and its derivative at z."""
    share = tl.sigmoid(z)
    return z * share, share * (1.0 + z * (1.0 - share))


@triton.jit
def _gated(
    y_ptr: tl.tensor, z_ptr: tl.tensor, place: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return y, silu(z), and silu's derivative at z, in fp32."""
    y = tl.load(y_ptr + place, inside, 0.0).to(tl.float32)
    z = tl.load(z_ptr + place, inside, 0.0).to(tl.float32)
    opened, slope = silu(z)
    return y, opened, slope


@triton.jit
def _heads_of_block(
    block: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the indices of HEADS heads, the offsets of their channels in a token, and a mask of these channels.

    The mask is False for padding: head indices from `heads` on, and channels from P on.
    """
    h = block * HEADS + tl.arange(0, HEADS)
    p = tl.arange(0, P_PADDED)
    place = h[:, None] * P + p[None, :]
    return h, place, (h < heads)[:, None] & (p < P)[None, :]


@triton.jit
def _norm(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, weight_ptr: tl.tensor,
    out_ptr: tl.tensor, out_row: int, out_token: int, eps: float, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gated norm for one token and group. Grid: (tokens, rows, groups)."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * SIZE + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < SIZE
    y, opened, _ = _gated(y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, inside)
    v = y * opened
    weight = tl.load(weight_ptr + place, inside, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / SIZE + eps)
    tl.store(out_ptr + row * out_row + token * out_token + place, v * scale * weight, inside)


@triton.jit
def _norm_backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, weight_ptr: tl.tensor,
    grad_ptr: tl.tensor, grad_row: int, grad_token: int, grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int,
    grad_z_ptr: tl.tensor, grad_z_row: int, grad_z_token: int, sums_ptr: tl.tensor, eps: float, rows: int,
    length: int, channels: int, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store dy and dz for one group at every S-th token, and the sum over these tokens for dweight.

    Grid: (S, groups). Program s computes the tokens s, s + S, s + 2 * S and so on. Tokens are numbered over all rows.
    """
    place = tl.program_id(1) * SIZE + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < SIZE
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.cdiv(rows * length - tl.program_id(0), tl.num_programs(0))):
        index = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        row = index // length
        token = index % length
        y, opened, slope = _gated(
            y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, inside
        )
        v = y * opened
        grad = tl.load(grad_ptr + row * grad_row + token * grad_token + place, inside, 0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / SIZE + eps)
        of_weight += grad * v * scale
        weighted = grad * tl.load(weight_ptr + place, inside, 0.0).to(tl.float32)
        grad_v = scale * (weighted - v * (tl.sum(weighted * v, 0) * scale * scale / SIZE))
        tl.store(grad_y_ptr + row * grad_y_row + token * grad_y_token + place, grad_v * opened, inside)
        tl.store(grad_z_ptr + row * grad_z_row + token * grad_z_token + place, grad_v * y * slope, inside)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * channels + place, of_weight, inside)


@triton.jit
def _squares(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, squares_ptr: tl.tensor,
    length: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store each head's sum of v^2 for one token and HEADS heads. Grid: (tokens, rows, head blocks)."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    h, place, inside = _heads_of_block(tl.program_id(2), heads, P, P_PADDED, HEADS)
    y, opened, _ = _gated(y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, inside)
    v = y * opened
    tl.store(squares_ptr + (row * length + token) * heads + h, tl.sum(v * v, 1), h < heads)


@triton.jit
def _squares_backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, grad_ptr: tl.tensor,
    grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int, grad_z_ptr: tl.tensor, grad_z_row: int,
    grad_z_token: int, length: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store dy and dz for one token and HEADS heads, given the gradient for each head's sum of v^2.

    Grid: (tokens, rows, head blocks).
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    h, place, inside = _heads_of_block(tl.program_id(2), heads, P, P_PADDED, HEADS)
    y, opened, slope = _gated(
        y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, inside
    )
    grad = tl.load(grad_ptr + (row * length + token) * heads + h, h < heads, 0.0)
    grad_v = 2.0 * y * opened * grad[:, None]
    tl.store(grad_y_ptr + row * grad_y_row + token * grad_y_token + place, grad_v * opened, inside)
    tl.store(grad_z_ptr + row * grad_z_row + token * grad_z_token + place, grad_v * y * slope, inside)


@triton.jit
def _scale(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, scale_ptr: tl.tensor,
    weight_ptr: tl.tensor, out_ptr: tl.tensor, out_row: int, out_token: int, length: int, heads: int,
    P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store v * scale * weight for one token and HEADS heads. Grid: (tokens, rows, head blocks)."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    h, place, inside = _heads_of_block(tl.program_id(2), heads, P, P_PADDED, HEADS)
    y, opened, _ = _gated(y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, inside)
    scale = tl.load(scale_ptr + (row * length + token) * heads + h, h < heads, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + token * out_token + place, y * opened * scale[:, None] * weight, inside)


@triton.jit
def _scale_backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, scale_ptr: tl.tensor,
    weight_ptr: tl.tensor, grad_ptr: tl.tensor, grad_row: int, grad_token: int, grad_y_ptr: tl.tensor, grad_y_row: int,
    grad_y_token: int, grad_z_ptr: tl.tensor, grad_z_row: int, grad_z_token: int, grad_scale_ptr: tl.tensor,
    sums_ptr: tl.tensor, rows: int, length: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store dy, dz and dscale for HEADS heads at every S-th token, and the sum over these tokens for dweight.

    Grid: (S, head blocks). Program s computes the tokens s, s + S, s + 2 * S and so on. Tokens are numbered over all
    rows.
    """
    h, place, inside = _heads_of_block(tl.program_id(1), heads, P, P_PADDED, HEADS)
    weight = tl.load(weight_ptr + place, inside, 0.0).to(tl.float32)
    of_weight = tl.zeros((HEADS, P_PADDED), tl.float32)
    for turn in range(tl.cdiv(rows * length - tl.program_id(0), tl.num_programs(0))):
        index = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        row = index // length
        token = index % length
        y, opened, slope = _gated(
            y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, inside
        )
        grad = tl.load(grad_ptr + row * grad_row + token * grad_token + place, inside, 0.0).to(tl.float32)
        scale = tl.load(scale_ptr + index * heads + h, h < heads, 0.0).to(tl.float32)[:, None]
        weighted = grad * weight
        v = y * opened
        tl.store(grad_scale_ptr + index * heads + h, tl.sum(weighted * v, 1), h < heads)
        of_weight += grad * v * scale
        grad_v = weighted * scale
        tl.store(grad_y_ptr + row * grad_y_row + token * grad_y_token + place, grad_v * opened, inside)
        tl.store(grad_z_ptr + row * grad_z_row + token * grad_z_token + place, grad_v * y * slope, inside)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * heads * P + place, of_weight, inside)
