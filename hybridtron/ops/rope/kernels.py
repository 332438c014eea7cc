"""Triton kernel for rotary positions (RoPE): x is read once, and the result is written once.

x's gradient is dy rotated by the negated angles. So the backward pass runs the same kernel, and x does not have to be
saved. x's rows and tokens may have any order in memory. The kernel computes in fp32. It was checked on an H200
(benchmarks/gpu.md).

Legend: B rows (sequences in the batch), L tokens per row, H heads, K channels per head, k half of the rotated channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import empty_in_order, last_side_by_side, launch, power_of_2
from hybridtron.ops.rope.reference import RopeInputs

WARPS = 4


def apply_rope(inputs: RopeInputs) -> Tensor:
    """Return x with all heads rotated. Gradients with respect to x are supported."""
    return _Rope.apply(*inputs)


class _Rope(torch.autograd.Function):
    """Autograd function that saves only the angles' cos and sin."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BLk, sin_BLk)
        return rotated(x_BLHK, cos_BLk, sin_BLk, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return rotated(grads[0], *ctx.saved_tensors, back=True), None, None


def rotated(x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor, back: bool) -> Tensor:
    """Return x with each head rotated by its token's angles, or by the negated angles if `back` is True."""
    x_BLHK = last_side_by_side(x_BLHK)
    rows, length, heads, size = x_BLHK.shape
    half = cos_BLk.shape[-1]
    y_BLHK = empty_in_order(x_BLHK)
    launch(
        _rotate, (length, rows), x_BLHK, *x_BLHK.stride()[:3], y_BLHK, *y_BLHK.stride()[:3],
        *(t.contiguous() for t in (cos_BLk, sin_BLk)), length, heads, back, half, power_of_2(half),
        size - 2 * half, power_of_2(max(1, size - 2 * half)), power_of_2(heads), warps=WARPS,
    )  # fmt: skip
    return y_BLHK


@triton.jit
def _rotate(
    x_ptr: tl.tensor, x_row: int, x_token: int, x_head: int, y_ptr: tl.tensor, y_row: int, y_token: int, y_head: int,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, length: int, heads: int, BACK: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, STILL: tl.constexpr, STILL_PADDED: tl.constexpr, HEADS_PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Store all heads of one token, rotated. Grid: (tokens, rows).

    A head's first 2 * HALF channels are rotated; channels k and HALF + k are a pair. Its last STILL channels are
    copied. HALF_PADDED, STILL_PADDED and HEADS_PADDED are HALF, STILL and the number of heads, padded to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, HALF_PADDED)
    h = tl.arange(0, HEADS_PADDED)
    angle = (row * length + token) * HALF + k
    cos = tl.load(cos_ptr + angle, k < HALF, 0.0)[None, :]
    sin = tl.load(sin_ptr + angle, k < HALF, 0.0)[None, :]
    if BACK:
        sin = -sin
    in_half = (h < heads)[:, None] & (k < HALF)[None, :]
    x_place = x_ptr + row * x_row + token * x_token + (h * x_head)[:, None]
    y_place = y_ptr + row * y_row + token * y_token + (h * y_head)[:, None]
    first = tl.load(x_place + k[None, :], in_half, 0.0).to(tl.float32)
    second = tl.load(x_place + HALF + k[None, :], in_half, 0.0).to(tl.float32)
    tl.store(y_place + k[None, :], first * cos - second * sin, in_half)
    tl.store(y_place + HALF + k[None, :], second * cos + first * sin, in_half)
    if STILL > 0:
        t = tl.arange(0, STILL_PADDED)
        in_rest = (h < heads)[:, None] & (t < STILL)[None, :]
        still = tl.load(x_place + 2 * HALF + t[None, :], in_rest, 0.0)
        tl.store(y_place + 2 * HALF + t[None, :], still, in_rest)
