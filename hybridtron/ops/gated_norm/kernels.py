"""The gated norm by Triton, whole and in two steps: a pass reads what it needs once, and makes v = y silu(z) again.

The equations of the steps are those of `reference`; with r = 1 / sqrt(mean(v^2) + eps), those of the whole are

    out = v r weight,   dv = r (dout weight - v r^2 mean(dout weight v)),   dweight = sum over tokens of dout v r

fp32 inside. A program has some heads of a token, or a group of it; that of the output's gradients has a share of the
tokens, and adds up the weight's gradient on the way. The shares' sums are added up in their order, so that the same
call gives the same bits again. Right on an H200 (benchmarks/gpu.md), where the whole had fewer warps a group.

Legend as in `reference`; S shares of the tokens.
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
    last_side_by_side,
    launch,
    power_of_2,
    programs_at_once,
)

VALUES = 1024  # of one program: 8 to a thread
WARPS = 4
WARP_VALUES = 256  # channels of a group for each warp: 8 to a thread
MOST_WARPS = 16  # of a group: 16 to a thread where it has more than 4096 channels
RESIDENT_WARPS = 24  # of a multiprocessor in the whole's backward pass, whose threads need 80 registers for 8 channels
SHARES = 528  # of the tokens, in two steps: four for each multiprocessor of an H100; the sum's order depends on it


def gated_norm(inputs: GatedNormInputs) -> Tensor:
    """The norm, with a backward pass."""
    return _GatedNorm.apply(*inputs)


def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    """Sums over each head, with a backward pass."""
    return _Squares.apply(*inputs)


def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    """The output, with a backward pass."""
    return _Scale.apply(*inputs)


class _GatedNorm(torch.autograd.Function):
    """Keeps y, z and the weight."""

    @staticmethod
    def forward(ctx: Any, y_BLE: Tensor, z_BLE: Tensor, weight_E: Tensor, groups: int, eps: float) -> Tensor:
        y_BLE, z_BLE, weight_E = last_side_by_side(y_BLE), last_side_by_side(z_BLE), weight_E.contiguous()
        ctx.save_for_backward(y_BLE, z_BLE, weight_E)
        ctx.groups, ctx.eps = groups, eps
        rows, length, channels = y_BLE.shape
        out, size = empty_in_order(y_BLE), channels // groups
        given = (*_read(y_BLE, z_BLE), weight_E, out, *out.stride()[:2], eps, size, power_of_2(size))
        launch(_norm, (length, rows, groups), *given, warps=_warps_of_group(size))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_BLE, z_BLE, weight_E = ctx.saved_tensors
        grad = last_side_by_side(grads[0])
        rows, length, channels = y_BLE.shape
        grad_y, grad_z, size = empty_in_order(y_BLE), empty_in_order(z_BLE), channels // ctx.groups
        warps = _warps_of_group(size)
        shares = min(max(1, programs_at_once(warps, RESIDENT_WARPS) // ctx.groups), rows * length)
        sums_SE = weight_E.new_empty(shares, channels, dtype=torch.float32)
        launch(
            _norm_backward, (shares, ctx.groups), *_read(y_BLE, z_BLE), weight_E, grad, *grad.stride()[:2],
            *_read(grad_y, grad_z), sums_SE, ctx.eps, rows, length, channels, size, power_of_2(size),
            warps=warps, registers=80 if size <= WARP_VALUES * MOST_WARPS else 128,
        )  # fmt: skip
        return grad_y, grad_z, sums_SE.sum(0).to(weight_E.dtype), None, None


class _Squares(torch.autograd.Function):
    """Keeps y and z."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
        y_BLHP, z_BLHP = _heads_side_by_side(y_BLHP), _heads_side_by_side(z_BLHP)
        ctx.save_for_backward(y_BLHP, z_BLHP)
        squares_BLH = y_BLHP.new_empty(y_BLHP.shape[:3], dtype=torch.float32)
        launch(_squares, _grid(y_BLHP), *_read(y_BLHP, z_BLHP), squares_BLH, *_sizes(y_BLHP), warps=WARPS)
        return squares_BLH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        y_BLHP, z_BLHP = ctx.saved_tensors
        grad_y, grad_z = empty_in_order(y_BLHP), empty_in_order(z_BLHP)
        launch(
            _squares_backward, _grid(y_BLHP), *_read(y_BLHP, z_BLHP), grads[0].float().contiguous(),
            *_read(grad_y, grad_z), *_sizes(y_BLHP), warps=WARPS,
        )  # fmt: skip
        return grad_y, grad_z


class _Scale(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor, scale_BLH: Tensor, weight_HP: Tensor) -> Tensor:
        y_BLHP, z_BLHP = _heads_side_by_side(y_BLHP), _heads_side_by_side(z_BLHP)
        scale_BLH, weight_HP = scale_BLH.contiguous(), weight_HP.contiguous()
        ctx.save_for_backward(y_BLHP, z_BLHP, scale_BLH, weight_HP)
        out = empty_in_order(y_BLHP)
        launch(
            _scale, _grid(y_BLHP), *_read(y_BLHP, z_BLHP), scale_BLH, weight_HP, out, *out.stride()[:2],
            *_sizes(y_BLHP), warps=WARPS,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        y_BLHP, z_BLHP, scale_BLH, weight_HP = ctx.saved_tensors
        grad = _heads_side_by_side(grads[0])
        rows, length, heads, size = y_BLHP.shape
        grad_y, grad_z, grad_scale = empty_in_order(y_BLHP), empty_in_order(z_BLHP), torch.empty_like(scale_BLH)
        shares = min(SHARES, rows * length)
        sums_SHP = weight_HP.new_empty(shares, heads, size, dtype=torch.float32)
        launch(
            _scale_backward, (shares, _grid(y_BLHP)[2]), *_read(y_BLHP, z_BLHP), scale_BLH, weight_HP, grad,
            *grad.stride()[:2], *_read(grad_y, grad_z), grad_scale, sums_SHP, rows, *_sizes(y_BLHP), warps=WARPS,
        )  # fmt: skip
        return grad_y, grad_z, grad_scale, sums_SHP.sum(0).to(weight_HP.dtype)


def _heads_side_by_side(x_BLHP: Tensor) -> Tensor:
    """The same, copied if the heads of a token are not contiguous."""
    return x_BLHP if x_BLHP.stride()[2:] == (x_BLHP.shape[3], 1) else x_BLHP.contiguous()


def _read(y_BLHP: Tensor, z_BLHP: Tensor) -> tuple[Any, ...]:
    return y_BLHP, *y_BLHP.stride()[:2], z_BLHP, *z_BLHP.stride()[:2]


def _warps_of_group(size: int) -> int:
    return min(MOST_WARPS, max(1, power_of_2(size) // WARP_VALUES))


def _heads_of_program(size: int) -> int:
    return max(1, VALUES // power_of_2(size))


def _grid(y_BLHP: Tensor) -> tuple[int, int, int]:
    rows, length, heads, size = y_BLHP.shape
    return length, rows, ceil_div(heads, _heads_of_program(size))


def _sizes(y_BLHP: Tensor) -> tuple[int, ...]:
    _, length, heads, size = y_BLHP.shape
    return length, heads, size, power_of_2(size), _heads_of_program(size)


@triton.jit
def _gated(
    y_ptr: tl.tensor, z_ptr: tl.tensor, place: tl.tensor, there: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """y, silu(z) and its slope."""
    y = tl.load(y_ptr + place, there, 0.0).to(tl.float32)
    z = tl.load(z_ptr + place, there, 0.0).to(tl.float32)
    share = tl.sigmoid(z)
    return y, z * share, share * (1.0 + z * (1.0 - share))


@triton.jit
def _norm(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, weight_ptr: tl.tensor,
    out_ptr: tl.tensor, out_row: int, out_token: int, eps: float, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place, there = tl.program_id(2) * SIZE + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < SIZE
    y, opened, _ = _gated(y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, there)
    v, weight = y * opened, tl.load(weight_ptr + place, there, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / SIZE + eps)
    tl.store(out_ptr + row * out_row + token * out_token + place, v * scale * weight, there)


@triton.jit
def _norm_backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, weight_ptr: tl.tensor,
    grad_ptr: tl.tensor, grad_row: int, grad_token: int, grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int,
    grad_z_ptr: tl.tensor, grad_z_row: int, grad_z_token: int, sums_ptr: tl.tensor, eps: float, rows: int,
    length: int, channels: int, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    place, there = tl.program_id(1) * SIZE + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < SIZE
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.cdiv(rows * length - tl.program_id(0), tl.num_programs(0))):
        index = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        row, token = index // length, index % length
        y, opened, slope = _gated(
            y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, there
        )
        v = y * opened
        grad = tl.load(grad_ptr + row * grad_row + token * grad_token + place, there, 0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / SIZE + eps)
        of_weight += grad * v * scale
        weighted = grad * tl.load(weight_ptr + place, there, 0.0).to(tl.float32)
        grad_v = scale * (weighted - v * (tl.sum(weighted * v, 0) * scale * scale / SIZE))
        tl.store(grad_y_ptr + row * grad_y_row + token * grad_y_token + place, grad_v * opened, there)
        tl.store(grad_z_ptr + row * grad_z_row + token * grad_z_token + place, grad_v * y * slope, there)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * channels + place, of_weight, there)


@triton.jit
def _squares(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, squares_ptr: tl.tensor,
    length: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, p = tl.program_id(2) * HEADS + tl.arange(0, HEADS), tl.arange(0, P_PADDED)
    place, there = h[:, None] * P + p[None, :], (h < heads)[:, None] & (p < P)[None, :]
    y, opened, _ = _gated(y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, there)
    v = y * opened
    tl.store(squares_ptr + (row * length + token) * heads + h, tl.sum(v * v, 1), h < heads)


@triton.jit
def _squares_backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, grad_ptr: tl.tensor,
    grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int, grad_z_ptr: tl.tensor, grad_z_row: int,
    grad_z_token: int, length: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, p = tl.program_id(2) * HEADS + tl.arange(0, HEADS), tl.arange(0, P_PADDED)
    place, there = h[:, None] * P + p[None, :], (h < heads)[:, None] & (p < P)[None, :]
    y, opened, slope = _gated(
        y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, there
    )
    grad = tl.load(grad_ptr + (row * length + token) * heads + h, h < heads, 0.0)
    grad_v = 2.0 * y * opened * grad[:, None]
    tl.store(grad_y_ptr + row * grad_y_row + token * grad_y_token + place, grad_v * opened, there)
    tl.store(grad_z_ptr + row * grad_z_row + token * grad_z_token + place, grad_v * y * slope, there)


@triton.jit
def _scale(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, scale_ptr: tl.tensor,
    weight_ptr: tl.tensor, out_ptr: tl.tensor, out_row: int, out_token: int, length: int, heads: int,
    P: tl.constexpr, P_PADDED: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, p = tl.program_id(2) * HEADS + tl.arange(0, HEADS), tl.arange(0, P_PADDED)
    place, there = h[:, None] * P + p[None, :], (h < heads)[:, None] & (p < P)[None, :]
    y, opened, _ = _gated(y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, there)
    scale = tl.load(scale_ptr + (row * length + token) * heads + h, h < heads, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place, there, 0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + token * out_token + place, y * opened * scale[:, None] * weight, there)


@triton.jit
def _scale_backward(
    y_ptr: tl.tensor, y_row: int, y_token: int, z_ptr: tl.tensor, z_row: int, z_token: int, scale_ptr: tl.tensor,
    weight_ptr: tl.tensor, grad_ptr: tl.tensor, grad_row: int, grad_token: int, grad_y_ptr: tl.tensor, grad_y_row: int,
    grad_y_token: int, grad_z_ptr: tl.tensor, grad_z_row: int, grad_z_token: int, grad_scale_ptr: tl.tensor,
    sums_ptr: tl.tensor, rows: int, length: int, heads: int, P: tl.constexpr, P_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:  # fmt: skip
    h, p = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, P_PADDED)
    place, there = h[:, None] * P + p[None, :], (h < heads)[:, None] & (p < P)[None, :]
    weight = tl.load(weight_ptr + place, there, 0.0).to(tl.float32)
    of_weight = tl.zeros((HEADS, P_PADDED), tl.float32)
    for turn in range(tl.cdiv(rows * length - tl.program_id(0), tl.num_programs(0))):
        index = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        row, token = index // length, index % length
        y, opened, slope = _gated(
            y_ptr + row * y_row + token * y_token, z_ptr + row * z_row + token * z_token, place, there
        )
        grad = tl.load(grad_ptr + row * grad_row + token * grad_token + place, there, 0.0).to(tl.float32)
        scale = tl.load(scale_ptr + index * heads + h, h < heads, 0.0).to(tl.float32)[:, None]
        weighted, v = grad * weight, y * opened
        tl.store(grad_scale_ptr + index * heads + h, tl.sum(weighted * v, 1), h < heads)
        of_weight += grad * v * scale
        grad_v = weighted * scale
        tl.store(grad_y_ptr + row * grad_y_row + token * grad_y_token + place, grad_v * opened, there)
        tl.store(grad_z_ptr + row * grad_z_row + token * grad_z_token + place, grad_v * y * slope, there)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * heads * P + place, of_weight, there)
