"""The gated norm of Mamba-2: whole, and in the two steps between which a sum over ranks can stand.

    v = y silu(z);   out = v / sqrt(mean of v^2 over the channels of a group + eps) * weight      (gate, then norm)

`gated_norm` is this, where a rank has all channels of its groups. `gated_squares` gives the sum of v^2 over each head,
`gated_scale` makes out of v and one factor for each head. What is between them, from the heads' sums to the groups'
means and back, is small and belongs to the mixer, as a group's heads may lie on several ranks. All work in fp32 at
least.

Legend: B rows, L tokens, E channels, H heads, P head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class GatedNormInputs(NamedTuple):
    """What is gated, the gate before its SiLU, a weight for each channel, and how many groups the channels make."""

    y_BLE: Tensor
    z_BLE: Tensor
    weight_E: Tensor
    groups: int
    eps: float


class GatedSquaresInputs(NamedTuple):
    """What is gated, and the gate before its SiLU."""

    y_BLHP: Tensor
    z_BLHP: Tensor


class GatedScaleInputs(NamedTuple):
    """The same, with a factor for each head of each token and a weight for each channel."""

    y_BLHP: Tensor
    z_BLHP: Tensor
    scale_BLH: Tensor
    weight_HP: Tensor


def gated_norm(inputs: GatedNormInputs) -> Tensor:
    """y silu(z) over its root mean square in each group, times the weight, in the type of y."""
    v_BLGK = gated(inputs.y_BLE, inputs.z_BLE).unflatten(-1, (inputs.groups, -1))
    normed_BLGK = v_BLGK * torch.rsqrt(v_BLGK.square().mean(-1, keepdim=True) + inputs.eps)
    return (normed_BLGK.flatten(2) * inputs.weight_E.to(v_BLGK.dtype)).to(inputs.y_BLE.dtype)


def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    """Sums of the squares of y silu(z) over each head (B, L, H), in fp32 or float64."""
    return gated(*inputs).square().sum(-1)


def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    """y silu(z) times a factor for each head and a weight for each channel, in the type of y."""
    v_BLHP = gated(inputs.y_BLHP, inputs.z_BLHP)
    return (v_BLHP * inputs.scale_BLH.unsqueeze(-1) * inputs.weight_HP.to(v_BLHP.dtype)).to(inputs.y_BLHP.dtype)


def gated(y: Tensor, z: Tensor) -> Tensor:
    """v = y silu(z), in fp32 at least."""
    return at_least_fp32(y) * F.silu(at_least_fp32(z))
