"""Rotary positions (RoPE) by C++ compiled for this CPU (`native/rope.cpp`).

x's gradient is dy rotated by the negated angles. So the backward pass calls the same function, and only the angles' cos
and sin are saved.

Legend: B rows (sequences in the batch), L tokens per row, H heads, K channels per head, k half of the rotated channels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, left_to_torch_compile, untraced
from hybridtron.ops.native.library import call, missing, threads
from hybridtron.ops.native.tensors import Tokens, like, readable, scalar, unsupported_types
from hybridtron.ops.precision import wide_type
from hybridtron.ops.rope.reference import RopeInputs

WORTH = 2**17  # elements per thread: with fewer, an additional thread gains no time


class RopeTask(ctypes.Structure):
    """Arguments for the compiled function, laid out as the struct `Rope` in rope.cpp.

    rows, length, heads, size, half: B, L, H, K, k
    back: 1 to rotate by the negated angles, else 0
    x, y: input and result
    cos, sin: the angles' cos and sin
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "half", "back")),
        *((name, Tokens) for name in ("x", "cos", "sin", "y")),
    )


def _unsupported_reason(inputs: RopeInputs) -> str | None:
    return left_to_torch_compile() or unsupported_types(inputs.x_BLHK)


@untraced  # torch.compile can't trace a function in C++
def apply_rope(inputs: RopeInputs) -> Tensor:
    return _NativeRope.apply(*inputs)


NATIVE = Implementation("native", apply_rope, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


class _NativeRope(torch.autograd.Function):
    """Autograd function that saves only the angles' cos and sin."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BLk, sin_BLk)
        return _rotated(x_BLHK, cos_BLk, sin_BLk, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_BLk, sin_BLk = ctx.saved_tensors
        return _rotated(grads[0], cos_BLk, sin_BLk, back=True), None, None


def _rotated(x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor, back: bool) -> Tensor:
    x_BLHK = readable(x_BLHK)
    cos_BLk = readable(cos_BLk)
    sin_BLk = readable(sin_BLk)
    rows, length, heads, size = x_BLHK.shape
    y_BLHK = like(x_BLHK)
    task = RopeTask(
        rows=rows, length=length, heads=heads, size=size, half=cos_BLk.shape[-1], back=back, x=Tokens.of(x_BLHK),
        cos=Tokens.of(cos_BLk), sin=Tokens.of(sin_BLk), y=Tokens.of(y_BLHK),
    )  # fmt: skip
    call(f"rope_{scalar(wide_type(x_BLHK))}", task, threads(x_BLHK.numel() / WORTH))
    return y_BLHK
