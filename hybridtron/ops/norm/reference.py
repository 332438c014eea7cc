"""Root-mean-square norm, alone and after the sum of a residual stream.

    rms_norm:      y = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm:  s = x + added,  and the norm of s

A residual stream may have a wider dtype than the weights, such as fp32 with bf16 weights. Its norm is then bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32, narrower


class RMSNormInputs(NamedTuple):
    """A tensor to norm over its last axis, and a weight for each channel."""

    x: Tensor
    weight: Tensor
    eps: float


class AddRMSNormInputs(NamedTuple):
    """A residual stream x, a tensor to add to it, and the norm's weight; `added` is not wider than `x` in dtype."""

    x: Tensor
    added: Tensor
    weight: Tensor
    eps: float


def rms_norm(inputs: RMSNormInputs) -> Tensor:
    """Normalize x over its last axis, in fp32 at least; return it in the narrower dtype of x and weight."""
    x, weight, eps = inputs
    wide = at_least_fp32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(narrower(x.dtype, weight.dtype))


def add_rms_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    """Return the sum, in the dtype of `x`, and the norm of that rounded sum."""
    summed = inputs.x + inputs.added
    return summed, rms_norm(RMSNormInputs(summed, inputs.weight, inputs.eps))
