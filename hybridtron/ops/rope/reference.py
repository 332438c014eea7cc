"""Rotary positions: every pair of channels is rotated by an angle that grows with the position.

    (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a),  a = position * base^(-i / k)

A rotation by a of queries and by b of keys leaves a score that depends on a - b alone, that is on their distance.
Channel i of a head is paired with channel i + k, where k is half the head size ("rotate half"), as transformers' Llama
pairs them; the interleaved pairing of the original paper is a permutation of the same channels and not offered.
There is no scaling of frequencies for longer contexts here.

Legend: B rows, L tokens, H heads, K head size, k half of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class RopeInputs(NamedTuple):
    """Heads, and a row of `rope_table` for each of their tokens."""

    x_BLHK: Tensor
    cos_BLk: Tensor
    sin_BLk: Tensor


def rope_table(
    positions_BL: Tensor, head_dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (B, L, k).

    fp32 angles would be off by 0.06 rad at position 1M, so they are formed and reduced in float64 (off by 1e-10).
    """
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=positions_BL.device)
    frequencies_k = base ** (-2.0 * pairs / head_dim)
    angles_BLk = positions_BL.double()[..., None] * frequencies_k
    reduced_BLk = angles_BLk.remainder(2 * math.pi)
    return reduced_BLk.cos().to(dtype), reduced_BLk.sin().to(dtype)


def apply_rope(inputs: RopeInputs) -> Tensor:
    """Rotate the channel pairs of every head by their token's angles; fp32 inside, the dtype of `x_BLHK` outside.

    Of more than 2 k channels the first 2 k are rotated, and the others unchanged.
    """
    x_BLHK, cos_BLk, sin_BLk = inputs
    rotary = 2 * cos_BLk.shape[-1]
    first, second = at_least_fp32(x_BLHK[..., :rotary]).chunk(2, dim=-1)
    cos, sin = cos_BLk[:, :, None].to(first.dtype), sin_BLk[:, :, None].to(first.dtype)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BLHK.dtype)
    return rotated if rotary == x_BLHK.shape[-1] else torch.cat((rotated, x_BLHK[..., rotary:]), dim=-1)
