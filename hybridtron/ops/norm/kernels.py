"""Triton kernels for the root-mean-square norm (RMSNorm), forward and backward; each kernel reads x once.

    y = x r w,   r = 1 / sqrt(mean(x^2) + eps)
    dx = r (w dy - x r^2 mean(w dy x)),   dw = sum over rows of dy x r

These equations are for the op `rms_norm`. The op `add_rms_norm` first adds a tensor to the residual stream x: s = x +
added, y = norm(s). It returns s and y. The gradient for s has two terms: one through the norm (dx above, with s in
place of x), and one through the output s. The backward kernel adds the two terms. Their sum is the gradient for x and
also the gradient for `added`. If `added` has another dtype than x, the kernel stores the sum twice, once in each dtype.

A tile is one long row or several short rows. One program computes full rows, so that it has all terms of a row's mean
over channels. The forward pass saves w, r (one value per row), and the tensor that was normed (x or s). The backward
kernel has at most as many programs as an H100 runs at the same time. Each program loops over several tiles, and adds up
their contributions to dw. A third kernel (`sum_kernels`) then adds up the partial sums of all programs. There are no
atomics, so results are deterministic.

Tiles with one row were checked on an H200 (benchmarks/gpu.md). Tiles with several rows have run only in Triton's
interpreter.

Legend: R rows (tokens, or heads of tokens: all leading axes, flattened), D channels, S programs in the backward kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch, programs_at_once, tile_of_rows
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs
from hybridtron.ops.precision import narrower
from hybridtron.ops.sum_kernels import sum_of_parts

TILE = 2048  # elements per tile; a longer row is a tile of its own
WARP_VALUES = 256  # elements per warp: 8 per thread
REGISTERS = 64  # registers per thread in the backward kernel: enough for a thread's 8 elements
RESIDENT_WARPS = 32  # warps that a multiprocessor runs at a time, if each thread has REGISTERS registers


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
    """Store y and r for a tile (ROWS, BLOCK).

    If `added` is given, the kernel norms s = x + added instead of x, and also stores s. s is rounded to x's dtype
    before it is normed: the backward pass reads the stored s, which must equal the s that was normed. Grid: one program
    per tile.
    """
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel_D = tl.arange(0, BLOCK)
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
    """Store dx, and a partial sum of dw for each program. Grid: S programs.

    Program p computes the tiles p, p + S, p + 2 * S and so on. It stores dx for each tile, and one partial sum of dw
    over its tiles. `dsum` is the gradient through the output s. All tensors for a tile are loaded before anything is
    computed, so that the loads overlap.
    """
    share = tl.program_id(0).to(tl.int64)
    channel_D = tl.arange(0, BLOCK)
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
        normed_RD = x_RD.to(tl.float32) * scale_R1
        dy_RD = dy_RD.to(tl.float32)
        grad_weight_RD += dy_RD * normed_RD
        weighted_RD = dy_RD * weight_D[None, :]
        dx_RD = scale_R1 * (weighted_RD - normed_RD * _mean(weighted_RD * normed_RD, channels)) + past_RD
        tl.store(dx_ptr + at_RD, dx_RD, mask=there_RD)
        if dadded_ptr is not None:
            tl.store(dadded_ptr + at_RD, dx_RD, mask=there_RD)
    grad_weight_D = tl.sum(grad_weight_RD, axis=0)
    tl.store(grad_weight_ptr + share * channels + channel_D, grad_weight_D, mask=channel_D < channels)


def rms_norm(inputs: RMSNormInputs) -> Tensor:
    """Return the norm over the last axis, computed in fp32.

    The result has x's dtype or the weight's dtype, whichever has the lower precision.
    """
    return _RMSNorm.apply(inputs.x, None, inputs.weight, inputs.eps)


def add_rms_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    """Return x + added, and the norm of this sum.

    `added` must have x's shape, and a dtype with the same or a lower precision.
    """
    return _RMSNorm.apply(*inputs)


class _RMSNorm(torch.autograd.Function):
    """Autograd function for both ops. It saves the tensor that is normed (x or s), the weight and r."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight_D: Tensor, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = x.contiguous()
        weight_D = weight_D.contiguous()
        summed = None if added is None else torch.empty_like(x)
        channels = x.shape[-1]
        y = torch.empty_like(x, dtype=narrower(x.dtype, weight_D.dtype))
        rows = x.numel() // channels
        scale_R = x.new_empty(rows, dtype=torch.float32)
        tile_rows, block, warps = tile_of_rows(channels, TILE, WARP_VALUES)
        if added is not None:
            added = added.contiguous()
        grid = (ceil_div(rows, tile_rows),)
        launch(
            _forward, grid, x, added, weight_D, summed, y, scale_R, eps, rows, channels, tile_rows, block,
            warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(x if summed is None else summed, weight_D, scale_R)
        ctx.added_dtype = None if added is None else added.dtype
        return y if summed is None else (summed, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x, `added` and the weight, each in its input's dtype.

        The gradients for x and `added` are equal.
        """
        x, weight_D, scale_R = ctx.saved_tensors
        # of_sum: a list with the gradient through the output s; an empty list if s is not an output
        *of_sum, dy = (grad.contiguous() for grad in grads)
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
    """Return dx and dw, given the tensor that was normed (x or s), w, r (`scale_R`) and dy.

    dsum: gradient through the output s; None if s is not an output
    dadded: output tensor for a copy of dx in another dtype
    programs: maximum number of programs; by default as many as an H100 runs at the same time
    """
    dx = torch.empty_like(x)
    channels = x.shape[-1]
    rows = len(scale_R)
    tile_rows, block, warps = tile_of_rows(channels, TILE, WARP_VALUES)
    shares = min(ceil_div(rows, tile_rows), programs or programs_at_once(warps, RESIDENT_WARPS))
    shares_SD = scale_R.new_empty(shares, channels)
    launch(
        _backward, (shares,), x, weight_D, dy, dsum, scale_R, dx, dadded, shares_SD, rows, channels, tile_rows, block,
        warps=warps, registers=REGISTERS,
    )  # fmt: skip
    return dx, sum_of_parts(shares_SD.unsqueeze(0), weight_D.dtype).squeeze(0)
