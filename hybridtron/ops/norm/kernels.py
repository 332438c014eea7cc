"""Root-mean-square norm by Triton kernels, forward and backward: x is read once, and once more for backward.

    y = x r w,   r = 1 / sqrt(mean(x^2) + eps)
    dx = r (w dy - x r^2 mean(w dy x)),   dw = sum over rows of dy x r

Or of a sum, s = x + added: y is the norm of s, and x and `added` have one gradient, the norm's share of it added to
what reaches s past the norm. So s is not read again to be normed, and the norm's share is never stored. x and s may be
wider than the rest, as a residual stream in fp32 beside bf16: their gradient is then stored in both types.

A program takes whole rows, so that no sum over channels leaves it. Backward keeps x or s, w and one number a row. A
fixed number of programs goes through the rows and adds up dw for its own; their sums are then added up in the order of
the programs, so that the same call gives the same bits again.

Right on an H200 (benchmarks/gpu.md).

Legend: R rows (of any leading axes), D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import launch, power_of_2
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs
from hybridtron.ops.precision import narrower

PROGRAMS = 264  # of the backward pass: two for each multiprocessor of an H100; the order of dw's sum depends on it
WARP_VALUES = 512  # channels of a row for each warp


@triton.jit
def _mean(x_D: tl.tensor, channels: int) -> tl.tensor:
    return tl.sum(x_D, axis=0) / channels  # pyrefly: ignore[bad-return, unsupported-operation]


@triton.jit
def _forward(
    x_RD: tl.tensor,
    added_RD: tl.tensor | None,
    weight_D: tl.tensor,
    sum_RD: tl.tensor | None,
    y_RD: tl.tensor,
    scale_R: tl.tensor,
    eps: float,
    channels: int,
    BLOCK: tl.constexpr,
) -> None:
    """Of one row; where something is added, the norm is that of the sum as it is stored, which backward reads."""
    row, channel_D = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there_D = channel_D < channels
    x_D = tl.load(x_RD + row * channels + channel_D, mask=there_D, other=0.0).to(tl.float32)
    if added_RD is not None:
        x_D += tl.load(added_RD + row * channels + channel_D, mask=there_D, other=0.0).to(tl.float32)
        x_D = x_D.to(x_RD.dtype.element_ty).to(tl.float32)  # pyrefly: ignore[missing-attribute]
        tl.store(sum_RD + row * channels + channel_D, x_D, mask=there_D)
    scale = 1.0 / tl.sqrt_rn(_mean(x_D * x_D, channels) + eps)
    weight_D = tl.load(weight_D + channel_D, mask=there_D, other=0.0).to(tl.float32)
    tl.store(y_RD + row * channels + channel_D, x_D * scale * weight_D, mask=there_D)
    tl.store(scale_R + row, scale)


@triton.jit
def _backward(
    x_RD: tl.tensor,
    weight_D: tl.tensor,
    dy_RD: tl.tensor,
    dsum_RD: tl.tensor | None,
    scale_R: tl.tensor,
    dx_RD: tl.tensor,
    dadded_RD: tl.tensor | None,
    grad_weight_SD: tl.tensor,
    rows: int,
    channels: int,
    BLOCK: tl.constexpr,
) -> None:
    """Of every row of this program's share."""
    share, channel_D = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there_D = channel_D < channels
    weight_D = tl.load(weight_D + channel_D, mask=there_D, other=0.0).to(tl.float32)
    grad_weight_D = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = share + turn * tl.num_programs(0)
        at = row * channels
        scale = tl.load(scale_R + row)
        normed_D = tl.load(x_RD + at + channel_D, mask=there_D, other=0.0).to(tl.float32) * scale
        dy_D = tl.load(dy_RD + at + channel_D, mask=there_D, other=0.0).to(tl.float32)
        grad_weight_D += dy_D * normed_D
        weighted_D = dy_D * weight_D
        dx_D = scale * (weighted_D - normed_D * _mean(weighted_D * normed_D, channels))
        if dsum_RD is not None:
            dx_D += tl.load(dsum_RD + at + channel_D, mask=there_D, other=0.0).to(tl.float32)
        tl.store(dx_RD + at + channel_D, dx_D, mask=there_D)
        if dadded_RD is not None:
            tl.store(dadded_RD + at + channel_D, dx_D, mask=there_D)
    tl.store(grad_weight_SD + share * channels + channel_D, grad_weight_D, mask=there_D)


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
        block, warps = _row(channels)
        tensors = (x, None if added is None else added.contiguous(), weight_D, summed, y, scale_R)
        launch(_forward, (rows,), *tensors, eps, channels, block, warps=warps)
        ctx.save_for_backward(x if summed is None else summed, weight_D, scale_R)
        ctx.added_dtype = None if added is None else added.dtype
        return y if summed is None else (summed, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of what was normed is also that of what was added."""
        x, weight_D, scale_R = ctx.saved_tensors
        *of_sum, dy = (grad.contiguous() for grad in grads)  # of the sum: what reaches it past the norm
        dx, channels, rows = torch.empty_like(x), x.shape[-1], len(scale_R)
        dadded = None if ctx.added_dtype in (None, x.dtype) else torch.empty_like(x, dtype=ctx.added_dtype)
        shares = min(rows, PROGRAMS)
        shares_SD = scale_R.new_empty(shares, channels)
        block, warps = _row(channels)
        given = (x, weight_D, dy, of_sum[0] if of_sum else None, scale_R)
        launch(_backward, (shares,), *given, dx, dadded, shares_SD, rows, channels, block, warps=warps)
        of_added = None if ctx.added_dtype is None else dx if dadded is None else dadded
        return dx, of_added, shares_SD.sum(0).to(weight_D.dtype), None


def _row(channels: int) -> tuple[int, int]:
    """The tile that holds a row, and the warps that share it."""
    block = power_of_2(channels)
    return block, min(max(block // WARP_VALUES, 1), 16)
