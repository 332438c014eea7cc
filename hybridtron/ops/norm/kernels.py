"""Root-mean-square norm by Triton kernels, forward and backward: x is read once, and once more for backward.

    y = x r w,   r = 1 / sqrt(mean(x^2) + eps)
    dx = r (w dy - x r^2 mean(w dy x)),   dw = sum over rows of dy x r

Or of a sum, s = x + added: y is the norm of s, and x and `added` have one gradient, the norm's share of it added to
what reaches s past the norm. So s is not read again to be normed, and the norm's share is never stored. x and s may be
wider than the rest, as a residual stream in fp32 beside bf16: their gradient is then stored in both types.

A program takes a tile of whole rows, so that no sum over channels leaves it: several rows where they are short, as
those of a head. Backward keeps x or s, w and one number a row. As many programs as fit on a GPU at a time go through
the tiles and add up dw for their own; their sums are then added up in the order of the programs, so that the same call
gives the same bits again.

Right on an H200 (benchmarks/gpu.md) when a program took one row at a time; its tiles have run in the interpreter alone.

Legend: R rows (of any leading axes), D channels, S programs of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2, programs_at_once
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs
from hybridtron.ops.precision import narrower

TILE = 2048  # values of the rows that a program takes at a time, where one row is not longer
WARP_VALUES = 256  # of a tile: 8 to a thread
REGISTERS = 64  # of a thread, which hold what backward needs of 8 values
RESIDENT_WARPS = 32  # of a multiprocessor, whose registers these are then


@triton.jit
def _mean(x_RD: tl.tensor, channels: int) -> tl.tensor:
    return tl.sum(x_RD, axis=1)[:, None] / channels  # pyrefly: ignore[bad-return, unsupported-operation]


@triton.jit
def _forward(
    x_ptr: tl.tensor,
    added_ptr: tl.tensor | None,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor | None,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: float,
    rows: int,
    channels: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalize a tile; where something is added, normalize the sum as it is stored, which backward reads."""
    row_R, channel_D = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there_RD = (row_R < rows)[:, None] & (channel_D < channels)[None, :]
    at_RD = row_R[:, None] * channels + channel_D[None, :]
    weight_D = tl.load(weight_ptr + channel_D, mask=channel_D < channels, other=0.0).to(tl.float32)
    x_RD = tl.load(x_ptr + at_RD, mask=there_RD, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x_RD += tl.load(added_ptr + at_RD, mask=there_RD, other=0.0).to(tl.float32)
        x_RD = x_RD.to(x_ptr.dtype.element_ty).to(tl.float32)  # pyrefly: ignore[missing-attribute]
        tl.store(sum_ptr + at_RD, x_RD, mask=there_RD)
    scale_R1 = 1.0 / tl.sqrt_rn(_mean(x_RD * x_RD, channels) + eps)
    tl.store(y_ptr + at_RD, x_RD * scale_R1 * weight_D[None, :], mask=there_RD)
    tl.store(scale_ptr + row_R[:, None], scale_R1, mask=(row_R < rows)[:, None])


@triton.jit
def _backward(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dsum_ptr: tl.tensor | None,
    scale_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dadded_ptr: tl.tensor | None,
    grad_weight_ptr: tl.tensor,
    rows: int,
    channels: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the gradients of all tiles in this program's share; of each, all is loaded before computing."""
    share, channel_D = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    weight_D = tl.load(weight_ptr + channel_D, mask=channel_D < channels, other=0.0).to(tl.float32)
    grad_weight_RD = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(tl.cdiv(tl.cdiv(rows, ROWS) - tl.program_id(0), tl.num_programs(0))):
        row_R = (share + turn * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        there_RD = (row_R < rows)[:, None] & (channel_D < channels)[None, :]
        at_RD = row_R[:, None] * channels + channel_D[None, :]
        scale_R1 = tl.load(scale_ptr + row_R[:, None], mask=(row_R < rows)[:, None], other=0.0)
        x_RD = tl.load(x_ptr + at_RD, mask=there_RD, other=0.0)
        dy_RD = tl.load(dy_ptr + at_RD, mask=there_RD, other=0.0)
        past_RD = tl.zeros([ROWS, BLOCK], tl.float32)
        if dsum_ptr is not None:
            past_RD = tl.load(dsum_ptr + at_RD, mask=there_RD, other=0.0).to(tl.float32)
        normed_RD, dy_RD = x_RD.to(tl.float32) * scale_R1, dy_RD.to(tl.float32)
        grad_weight_RD += dy_RD * normed_RD
        weighted_RD = dy_RD * weight_D[None, :]
        dx_RD = scale_R1 * (weighted_RD - normed_RD * _mean(weighted_RD * normed_RD, channels)) + past_RD
        tl.store(dx_ptr + at_RD, dx_RD, mask=there_RD)
        if dadded_ptr is not None:
            tl.store(dadded_ptr + at_RD, dx_RD, mask=there_RD)
    grad_weight_D = tl.sum(grad_weight_RD, axis=0)
    tl.store(grad_weight_ptr + share * channels + channel_D, grad_weight_D, mask=channel_D < channels)


def rms_norm(inputs: RMSNormInputs) -> Tensor:
    """Over the last axis, in fp32, and returned in the narrower type of x and the weight."""
    return _RMSNorm.apply(inputs.x, None, inputs.weight, inputs.eps)


def add_rms_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    """x + added, and its norm; both are alike in shape, and `added` is no wider."""
    return _RMSNorm.apply(*inputs)


class _RMSNorm(torch.autograd.Function):
    """The norm, or where something is added the sum and its norm; keeps what was normed, weight, each row's scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight_D: Tensor, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, weight_D = x.contiguous(), weight_D.contiguous()
        summed = None if added is None else torch.empty_like(x)
        channels, y = x.shape[-1], torch.empty_like(x, dtype=narrower(x.dtype, weight_D.dtype))
        rows = x.numel() // channels
        scale_R = x.new_empty(rows, dtype=torch.float32)
        tile_rows, block, warps = tile(channels)
        tensors = (x, None if added is None else added.contiguous(), weight_D, summed, y, scale_R)
        grid = (ceil_div(rows, tile_rows),)
        launch(_forward, grid, *tensors, eps, rows, channels, tile_rows, block, warps=warps)
        ctx.save_for_backward(x if summed is None else summed, weight_D, scale_R)
        ctx.added_dtype = None if added is None else added.dtype
        return y if summed is None else (summed, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of what was normed is also that of what was added."""
        x, weight_D, scale_R = ctx.saved_tensors
        *of_sum, dy = (grad.contiguous() for grad in grads)  # of the sum: what reaches it past the norm
        dadded = None if ctx.added_dtype in (None, x.dtype) else torch.empty_like(x, dtype=ctx.added_dtype)
        dx, dweight_D = gradients(x, weight_D, scale_R, dy, of_sum[0] if of_sum else None, dadded)
        of_added = None if ctx.added_dtype is None else dx if dadded is None else dadded
        return dx, of_added, dweight_D, None


def gradients(
    x: Tensor,
    weight_D: Tensor,
    scale_R: Tensor,
    dy: Tensor,
    dsum: Tensor | None = None,
    dadded: Tensor | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """dx and dw, by as many programs as fit on a GPU at a time, or by another number; dx is stored in `dadded` too."""
    dx, channels, rows = torch.empty_like(x), x.shape[-1], len(scale_R)
    tile_rows, block, warps = tile(channels)
    shares = min(ceil_div(rows, tile_rows), programs or programs_at_once(warps, RESIDENT_WARPS))
    shares_SD = scale_R.new_empty(shares, channels)
    given = (x, weight_D, dy, dsum, scale_R, dx, dadded, shares_SD, rows, channels, tile_rows, block)
    launch(_backward, (shares,), *given, warps=warps, registers=REGISTERS)
    return dx, shares_SD.sum(0).to(weight_D.dtype)


def tile(channels: int) -> tuple[int, int, int]:
    """The rows that a program takes at a time, the power of two that holds one, and the warps that share them."""
    block = power_of_2(channels)
    rows = max(1, TILE // block)
    return rows, block, max(1, rows * block // WARP_VALUES)
