"""Root-mean-square norm, alone and after the sum of a residual stream.

    rms_norm:      y = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm:  s = x + added,  and the norm of s

A residual stream may be wider than what is computed in: fp32 beside bf16 weights. Its norm is then as narrow as these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32, narrower


class RMSNormInputs(NamedTuple):
    """What is normed over its last axis, and a weight for each channel."""

    x: Tensor
    weight: Tensor
    eps: float


class AddRMSNormInputs(NamedTuple):
    """A residual stream, what is added to it, and the weight of the norm; `x` is no narrower than `added`."""

    x: Tensor
    added: Tensor
    weight: Tensor
    eps: float


def rms_norm(inputs: RMSNormInputs) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32; returned in the narrower dtype of the two."""
    x, weight, eps = inputs
    wide = at_least_fp32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(narrower(x.dtype, weight.dtype))


def add_rms_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    """The sum, in the dtype of `x`, and the norm of that sum, which is rounded first."""
    summed = inputs.x + inputs.added
    return summed, rms_norm(RMSNormInputs(summed, inputs.weight, inputs.eps))
