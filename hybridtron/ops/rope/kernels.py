"""Rotary positions by Triton: heads are read once and written once, in whatever order they lie in memory.

The gradient of a rotation is the rotation back, so the backward pass is the same kernel with the angles' signs turned,
and keeps no heads. fp32 inside. Right on an H200 (benchmarks/gpu.md).

Legend: as in `apply_rope`; k half of the channels that turn, T those that do not.
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
    """Heads rotated, with a backward pass."""
    return _Rope.apply(*inputs)


class _Rope(torch.autograd.Function):
    """Keeps the angles."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BLk, sin_BLk)
        return rotated(x_BLHK, cos_BLk, sin_BLk, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return rotated(grads[0], *ctx.saved_tensors, back=True), None, None


def rotated(x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor, back: bool) -> Tensor:
    """Every head of a token by its token's angles, or back by them."""
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
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    k, h = tl.arange(0, HALF_PADDED), tl.arange(0, HEADS_PADDED)
    angle = (row * length + token) * HALF + k
    cos = tl.load(cos_ptr + angle, k < HALF, 0.0)[None, :]
    sin = tl.load(sin_ptr + angle, k < HALF, 0.0)[None, :]
    if BACK:
        sin = -sin
    there = (h < heads)[:, None] & (k < HALF)[None, :]
    x_place = x_ptr + row * x_row + token * x_token + (h * x_head)[:, None]
    y_place = y_ptr + row * y_row + token * y_token + (h * y_head)[:, None]
    first = tl.load(x_place + k[None, :], there, 0.0).to(tl.float32)
    second = tl.load(x_place + HALF + k[None, :], there, 0.0).to(tl.float32)
    tl.store(y_place + k[None, :], first * cos - second * sin, there)
    tl.store(y_place + HALF + k[None, :], second * cos + first * sin, there)
    if STILL > 0:
        t = tl.arange(0, STILL_PADDED)
        there = (h < heads)[:, None] & (t < STILL)[None, :]
        still = tl.load(x_place + 2 * HALF + t[None, :], there, 0.0)
        tl.store(y_place + 2 * HALF + t[None, :], still, there)
