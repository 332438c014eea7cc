"""Rotations by data-dependent angles, as Mamba-3 applies them to B and C. Lahoti et al. 2026.

    angles:      theta_t = theta_{t-1} + step_t rate_t   modulo 2 pi; from 0 where a row or a document begins
    turn_pairs:  x of a head = x of its group + the head's bias; its channels 2 s and 2 s + 1 are rotated as a pair:
                 (x1, x2) -> (x1 cos theta_s - x2 sin theta_s, x1 sin theta_s + x2 cos theta_s)

Each head has its own steps; all heads share the rates. If both keys and queries are rotated, a score depends on the
rotations between their tokens alone, so angles may begin anywhere. Channels from 2 S on are not rotated. RoPE (`rope`)
is the case of constant rates, with other pairs.

Legend: B rows, L tokens, H heads, G groups of heads, N state size, S angles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import at_least_fp32, wide_type

FULL_TURN = 2 * math.pi


class AngleInputs(NamedTuple):
    """Steps per head and rates per angle; without `documents_BL` a row is one document."""

    steps_BLH: Tensor
    rates_BLS: Tensor
    documents_BL: Tensor | None = None


class TurnInputs(NamedTuple):
    """Keys and queries by group, the bias that each head adds to them, and the angles of its channel pairs."""

    k_BLGN: Tensor
    q_BLGN: Tensor
    k_bias_HN: Tensor
    q_bias_HN: Tensor
    angles_BLHS: Tensor


def angles(inputs: AngleInputs) -> Tensor:
    """Return the angles of every token (B, L, H, S), in fp32 or float64."""
    steps_BLH = inputs.steps_BLH
    rates_BLS = inputs.rates_BLS
    starts_BL = document_starts(inputs.documents_BL)
    (rows, length, heads) = steps_BLH.shape
    size = rates_BLS.shape[2]
    theta_BHS = steps_BLH.new_zeros(rows, heads, size, dtype=wide_type(steps_BLH))
    every = []
    for t in range(length):
        if starts_BL is not None:
            theta_BHS = theta_BHS.masked_fill(starts_BL[:, t, None, None], 0)
        theta_BHS = (theta_BHS + steps_BLH[:, t].unsqueeze(2) * rates_BLS[:, t].unsqueeze(1)).remainder(FULL_TURN)
        every.append(theta_BHS)
    if every:
        return torch.stack(every, dim=1)
    return theta_BHS.unsqueeze(1)[:, :0]


def turn_pairs(inputs: TurnInputs) -> tuple[Tensor, Tensor]:
    """Return rotated keys and queries by head (B, L, H, N), in their input types; fp32 inside."""
    k_BLGN, q_BLGN, k_bias_HN, q_bias_HN, angles_BLHS = inputs
    k_BLHN, q_BLHN = (
        at_least_fp32(x_BLGN).repeat_interleave(len(bias_HN) // x_BLGN.shape[2], dim=2) + bias_HN
        for x_BLGN, bias_HN in ((k_BLGN, k_bias_HN), (q_BLGN, q_bias_HN))
    )
    return turned(k_BLHN, angles_BLHS).to(k_BLGN.dtype), turned(q_BLHN, angles_BLHS).to(q_BLGN.dtype)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the channel pairs on the last axis of x by their angles, which broadcast over its other axes."""
    pairs = x[..., : 2 * angles.shape[-1]].unflatten(-1, (-1, 2))
    (first, second) = pairs.unbind(-1)
    cos = angles.cos()
    sin = angles.sin()
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., rotated.shape[-1] :]), dim=-1)
