"""Mamba-2's gated norm, as one op or as two ops, and a norm before a gate.

    v = y silu(z);   out = v / sqrt(mean of v^2 over a group's channels + eps) * weight

`gated_norm` computes `out` in one op, if each tensor-parallel rank has all channels of its groups. If a group's heads
are divided over ranks, two ops are used. First, `gated_squares` returns each head's sum of v^2. The caller adds up
these sums over a group's heads on all ranks, and computes each head's factor 1 / sqrt(mean + eps). Then `gated_scale`
computes `out` from y, z, these factors (`scale`) and the weight. All three ops compute in fp32, or in float64 for
float64 inputs.

Other mixers norm each head first, and then multiply by the gate. That is the op `norm_before_gate`. Its weight has an
entry for each channel; all heads share this weight, or each head has its own weight:

    out = n weight g(z);   n = y / sqrt(mean of y^2 over the head's channels + eps);   g is silu or the sigmoid
    dz = dout n weight g'(z),   dn = dout weight g(z),   dy = (dn - n mean(dn n)) / sqrt(mean + eps),
    dweight = sum over tokens (and over heads, if they share the weight) of dout n g(z)

In the backward pass of `gated_squares` and `gated_scale`, let dv be the gradient for v. Then dy = dv silu(z), and
dz = dv y silu'(z), with

    gated_squares    dv = 2 v dsquares
    gated_scale      dv = dout weight scale
                     dscale = sum over the head's channels of dout weight v
                     dweight = sum over tokens of dout v scale

Legend: B rows (sequences in the batch), L tokens per row, E channels, H heads, P channels per head, G channel groups, K
channels per group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class GatedNormInputs(NamedTuple):
    """Activations y, gate z before SiLU, a weight for each channel, the number of channel groups, and eps."""

    y_BLE: Tensor
    z_BLE: Tensor
    weight_E: Tensor
    groups: int
    eps: float


class GatedSquaresInputs(NamedTuple):
    """Activations y, and gate z before SiLU."""

    y_BLHP: Tensor
    z_BLHP: Tensor


class GatedScaleInputs(NamedTuple):
    """Activations y, gate z before SiLU, a factor for each head and token, and a weight for each channel."""

    y_BLHP: Tensor
    z_BLHP: Tensor
    scale_BLH: Tensor
    weight_HP: Tensor


class NormBeforeGateInputs(NamedTuple):
    """Activations y, gate z before its activation, a weight (P,) or (H, P), eps, and the kind of the gate's activation.

    The gate's activation is the sigmoid if `sigmoid`, else SiLU.
    """

    y_BLHP: Tensor
    z_BLHP: Tensor
    weight: Tensor
    eps: float
    sigmoid: bool = False


def gated_norm(inputs: GatedNormInputs) -> Tensor:
    """Return the gated norm in y's dtype."""
    v_BLGK = gated(inputs.y_BLE, inputs.z_BLE).unflatten(-1, (inputs.groups, -1))
    normed_BLGK = v_BLGK * torch.rsqrt(v_BLGK.square().mean(-1, keepdim=True) + inputs.eps)
    return (normed_BLGK.flatten(2) * inputs.weight_E.to(v_BLGK.dtype)).to(inputs.y_BLE.dtype)


def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    """Return each head's sum of (y silu(z))^2 (B, L, H), in fp32 (float64 for float64 inputs)."""
    return gated(*inputs).square().sum(-1)


def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    """Return y silu(z) times each head's factor and each channel's weight, in y's dtype."""
    v_BLHP = gated(inputs.y_BLHP, inputs.z_BLHP)
    return (v_BLHP * inputs.scale_BLH.unsqueeze(-1) * inputs.weight_HP.to(v_BLHP.dtype)).to(inputs.y_BLHP.dtype)


def norm_before_gate(inputs: NormBeforeGateInputs) -> Tensor:
    """Return each head's norm times the weight and the gate, in z's dtype."""
    y_BLHP = at_least_fp32(inputs.y_BLHP)
    z_BLHP = at_least_fp32(inputs.z_BLHP)
    normed_BLHP = y_BLHP * torch.rsqrt(y_BLHP.square().mean(-1, keepdim=True) + inputs.eps)
    gate_BLHP = torch.sigmoid(z_BLHP) if inputs.sigmoid else F.silu(z_BLHP)
    return (normed_BLHP * inputs.weight.to(y_BLHP.dtype) * gate_BLHP).to(inputs.z_BLHP.dtype)


def gated(y: Tensor, z: Tensor) -> Tensor:
    """Return v = y silu(z), in fp32 (float64 for float64 inputs)."""
    return at_least_fp32(y) * F.silu(at_least_fp32(z))
