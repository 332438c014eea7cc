"""The two halves of a tensor along its last axis; their gradients are joined without a copy if possible.

In the backward pass, torch's `chunk` copies the halves' gradients into one tensor. If an op stores both gradients side
by side in memory, as the Triton kernels of SSD do, this copy is not needed.

Legend: C channels in a half. Any number of axes precedes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second half of the last axis, whose size must be even."""
    if x.shape[-1] % 2 == 1:
        raise ValueError(f"the last axis has the odd size {x.shape[-1]}, so it has no halves: pass an even size")
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, dim=-1)
        return first, second
    return _Halves.apply(x)  # type: ignore[return-value]


class _Halves(torch.autograd.Function):
    """Autograd function for `halves`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return joined(*grads)


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Return the halves in one tensor: a view if they lie side by side in memory, else a copy."""
    channels = first.shape[-1]
    is_shared = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    is_adjacent = second.storage_offset() - first.storage_offset() == channels
    if is_shared and is_adjacent and first.stride() == second.stride() and first.stride(-1) == 1:
        return first.as_strided((*first.shape[:-1], 2 * channels), first.stride(), first.storage_offset())
    return torch.cat((first, second), dim=-1)
