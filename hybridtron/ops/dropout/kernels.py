"""Triton kernel for dropout: each element is read once and written once.

Each token and each channel has an int32 number. A hash of an element's two numbers decides whether the element is
dropped; `reference.py` has the formula.

Legend: R tokens (all leading axes of x, flattened), C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dropout.reference import DropoutInputs, threshold
from hybridtron.ops.kernel_launch import ceil_div, launch

BLOCK = 1024  # channels per program: 8 per thread
WARPS = 4


def dropout(inputs: DropoutInputs) -> Tensor:
    """Return x after dropout. Gradients with respect to x are supported."""
    return _Dropout.apply(*inputs)


class _Dropout(torch.autograd.Function):
    """Autograd function that saves only token and channel numbers; the backward pass recomputes the hashes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(tokens, channels)
        ctx.share = share
        return dropped(x, tokens, channels, share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, channels = ctx.saved_tensors
        return dropped(grads[0], tokens, channels, ctx.share), None, None, None


def dropped(x: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
    """Return x with the dropped elements set to 0 and the remaining elements scaled by 1 / (1 - share)."""
    x = x.contiguous()
    tokens = tokens.contiguous()
    y = torch.empty_like(x)
    size = x.shape[-1]
    grid = (tokens.numel(), ceil_div(size, BLOCK))
    launch(_drop, grid, x, tokens, channels, y, size, threshold(share), 1 / (1 - share), BLOCK, warps=WARPS)
    return y


@triton.jit
def _drop(
    x_RC: tl.tensor,
    tokens_R: tl.tensor,
    channels_C: tl.tensor,
    y_RC: tl.tensor,
    size: int,
    minimum: int,
    scale: float,
    BLOCK: tl.constexpr,
) -> None:
    """Store the result y for one token and BLOCK channels. Grid: (tokens, channel blocks).

    The numbers of the token and the channel are hashed to 32 bits. The element is kept if these bits, as a signed
    int32, are at least `minimum`.
    """
    row = tl.program_id(0).to(tl.int64)
    channel_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_C = channel_C < size
    bits_C = (tl.load(tokens_R + row) ^ tl.load(channels_C + channel_C, there_C, 0)).to(tl.uint32, bitcast=True)
    bits_C = (bits_C ^ (bits_C >> 16)) * 0x85EBCA6B
    bits_C = (bits_C ^ (bits_C >> 13)) * 0xC2B2AE35
    bits_C = bits_C ^ (bits_C >> 16)
    x_C = tl.load(x_RC + row * size + channel_C, there_C, 0.0).to(tl.float32)
    y_C = tl.where(bits_C.to(tl.int32, bitcast=True) >= minimum, x_C * scale, 0.0)
    tl.store(y_RC + row * size + channel_C, y_C, there_C)
