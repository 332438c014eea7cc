"""Root-mean-square norm (RMSNorm), alone or after an addition.

    rms_norm:      y = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm:  s = x + added,   y = s / sqrt(mean(s^2) + eps) * weight

Means are over the last axis. In `add_rms_norm`, x is the residual stream, which may have a higher precision than the
weights. If x is fp32 and the weight is bf16, y is bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32, narrower


class RMSNormInputs(NamedTuple):
    """The tensor that is normed over its last axis, and a weight for each channel."""

    x: Tensor
    weight: Tensor
    eps: float


class AddRMSNormInputs(NamedTuple):
    """The residual stream x, the tensor `added` to add to it, and the norm's weight.

    The dtype of `added` has at most the precision of x's dtype.
    """

    x: Tensor
    added: Tensor
    weight: Tensor
    eps: float


def rms_norm(inputs: RMSNormInputs) -> Tensor:
    """Return the norm of x over its last axis, computed in fp32 (float64 for float64 inputs).

    The result has x's dtype or the weight's dtype, whichever has the lower precision.
    """
    x, weight, eps = inputs
    wide = at_least_fp32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(narrower(x.dtype, weight.dtype))


def add_rms_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    """Return s = x + added in x's dtype, and the norm of the rounded s."""
    summed = inputs.x + inputs.added
    return summed, rms_norm(RMSNormInputs(summed, inputs.weight, inputs.eps))
