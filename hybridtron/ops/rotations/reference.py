"""Rotations of keys and queries by data-dependent angles, as in Mamba-3 (Lahoti et al. 2026).

    angles:      theta_t = theta_{t-1} + step_t rate_t   modulo 2 pi; theta starts from 0 in each row and document
    turn_pairs:  x (key or query) of a head = x of its group + the head's bias; channels 2 * s and 2 * s + 1 rotate:
                 (x1, x2) -> (x1 cos theta_s - x2 sin theta_s, x1 sin theta_s + x2 cos theta_s)

Each head has its own steps; all heads share the rates. Because keys and queries are both rotated, a score depends only
on the difference of two angles. So a row that continues a document may start from theta = 0 too, if the carried state
is first rotated back by the previous row's last angle. Channels from 2 * S on are not rotated. RoPE (`ops/rope`)
differs in its constant rates, and in the channels that form a pair.

Legend: B rows (sequences in the batch), L tokens per row, H heads, G head groups (a group's heads share keys and
queries), N channels per key or query (the state size), S angles per head.
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
    """Steps for each head, and rates for each angle. If `documents_BL` is None, a row is one document."""

    steps_BLH: Tensor
    rates_BLS: Tensor
    documents_BL: Tensor | None = None


class TurnInputs(NamedTuple):
    """Keys and queries for each group, the biases that each head adds to them, and each head's angles."""

    k_BLGN: Tensor
    q_BLGN: Tensor
    k_bias_HN: Tensor
    q_bias_HN: Tensor
    angles_BLHS: Tensor


def angles(inputs: AngleInputs) -> Tensor:
    """Return the angles theta (B, L, H, S) in fp32 (float64 for float64 inputs)."""
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
    """Return each head's rotated keys and queries (B, L, H, N), in the inputs' dtypes.

    The computation is in fp32 (float64 for float64 inputs).
    """
    k_BLGN, q_BLGN, k_bias_HN, q_bias_HN, angles_BLHS = inputs
    k_BLHN, q_BLHN = (
        at_least_fp32(x_BLGN).repeat_interleave(len(bias_HN) // x_BLGN.shape[2], dim=2) + bias_HN
        for x_BLGN, bias_HN in ((k_BLGN, k_bias_HN), (q_BLGN, q_bias_HN))
    )
    return turned(k_BLHN, angles_BLHS).to(k_BLGN.dtype), turned(q_BLHN, angles_BLHS).to(q_BLGN.dtype)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return x with the channel pairs on its last axis rotated. `angles` broadcast over x's other axes."""
    pairs = x[..., : 2 * angles.shape[-1]].unflatten(-1, (-1, 2))
    (first, second) = pairs.unbind(-1)
    cos = angles.cos()
    sin = angles.sin()
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., rotated.shape[-1] :]), dim=-1)
