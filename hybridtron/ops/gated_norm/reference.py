"""The gated norm of Mamba-2: in full, and as two steps with a possible sum over ranks between them.

    v = y silu(z);   out = v / sqrt(mean of v^2 over the channels of a group + eps) * weight      (gate, then norm)

`gated_norm` computes this if a rank has all channels of its groups. Otherwise `gated_squares` returns the sum of v^2
over each head, and `gated_scale` computes `out` from v and one factor for each head. The small step between the two,
from the heads' sums to the groups' means and back, belongs to the mixer, as a group's heads may lie on several ranks.
All compute in fp32 at least.

Backward, with dv the gradient of v: dy = dv silu(z), and dz = dv y silu'(z), where

    of the squares     dv = 2 v dsquares
    of the output      dv = dout weight scale
                       dscale = sum over the head of dout weight v,   dweight = sum over tokens of dout v scale

Legend: B rows, L tokens, E channels, H heads, P head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class GatedNormInputs(NamedTuple):
    """Values y, their gate z before its SiLU, a weight for each channel, and the number of channel groups."""

    y_BLE: Tensor
    z_BLE: Tensor
    weight_E: Tensor
    groups: int
    eps: float


class GatedSquaresInputs(NamedTuple):
    """Values y, and their gate z before its SiLU."""

    y_BLHP: Tensor
    z_BLHP: Tensor


class GatedScaleInputs(NamedTuple):
    """Values y, their gate z before its SiLU, a factor for every head at each token, and a weight for each channel."""

    y_BLHP: Tensor
    z_BLHP: Tensor
    scale_BLH: Tensor
    weight_HP: Tensor


def gated_norm(inputs: GatedNormInputs) -> Tensor:
    """Divide y silu(z) by its root mean square in each group, times the weight; return it in the dtype of y."""
    v_BLGK = gated(inputs.y_BLE, inputs.z_BLE).unflatten(-1, (inputs.groups, -1))
    normed_BLGK = v_BLGK * torch.rsqrt(v_BLGK.square().mean(-1, keepdim=True) + inputs.eps)
    return (normed_BLGK.flatten(2) * inputs.weight_E.to(v_BLGK.dtype)).to(inputs.y_BLE.dtype)


def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    """Return the sum of (y silu(z))^2 over each head (B, L, H), in fp32 or float64."""
    return gated(*inputs).square().sum(-1)


def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    """Return y silu(z) times a factor for each head and a weight for each channel, in the dtype of y."""
    v_BLHP = gated(inputs.y_BLHP, inputs.z_BLHP)
    return (v_BLHP * inputs.scale_BLH.unsqueeze(-1) * inputs.weight_HP.to(v_BLHP.dtype)).to(inputs.y_BLHP.dtype)


def gated(y: Tensor, z: Tensor) -> Tensor:
    """Return v = y silu(z), in fp32 at least."""
    return at_least_fp32(y) * F.silu(at_least_fp32(z))
