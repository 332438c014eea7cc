"""Rotary positions by a Triton kernel of our own (`kernels`). Unmeasured on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.rope.reference import RopeInputs

MOST_CHANNELS = 16384  # of all heads of a token, which one program holds


def _unsupported_reason(inputs: RopeInputs) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile joins the reference to what stands around it"
    if inputs.x_BLHK.dtype == torch.float64:
        return "the kernel has no float64"
    channels = inputs.x_BLHK.shape[2] * inputs.x_BLHK.shape[3]
    return None if channels <= MOST_CHANNELS else f"takes {MOST_CHANNELS} channels of a token, not {channels}"


class _TritonRope(torch.autograd.Function):
    """Keeps the angles."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor) -> Tensor:
        from hybridtron.ops.rope import kernels

        ctx.save_for_backward(cos_BLk, sin_BLk)
        return kernels.rotated(x_BLHK, cos_BLk, sin_BLk, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from hybridtron.ops.rope import kernels

        return kernels.rotated(grads[0], *ctx.saved_tensors, back=True), None, None


def apply_rope(inputs: RopeInputs) -> Tensor:
    return _TritonRope.apply(*inputs)


TRITON = Implementation("triton", apply_rope, "cuda", "triton", _unsupported_reason)
