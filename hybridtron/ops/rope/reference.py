"""Rotary positions: every pair of channels is rotated by an angle that grows with the position.

    (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a),  a = position * f_i,  f_i = base^(-i / k)

If queries are rotated by a and keys by b, a score depends on a - b alone, that is on their distance. Channel i of a
head is paired with channel i + k, where k is half the head size ("rotate half"), as transformers' Llama pairs them; the
interleaved pairing of the original paper is a permutation of the same channels and not offered. The frequencies f can
be scaled for longer rows by the rules in `architecture/rope.py`; YaRN also multiplies cos and sin by a factor.

Legend: B rows, L tokens, H heads, K head size, k half of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.architecture.rope import RopeOptions
from hybridtron.ops.precision import at_least_fp32


class RopeInputs(NamedTuple):
    """Heads, and cos and sin of each token's angles, from `rope_table`."""

    x_BLHK: Tensor
    cos_BLk: Tensor
    sin_BLk: Tensor


def frequencies(rope: RopeOptions, channels: int, device: torch.device | str = "cpu") -> Tensor:
    """Return each channel pair's rotation per token in radians, (k,) in float64, scaled as `rope` says."""
    pairs = torch.arange(channels // 2, dtype=torch.float64, device=device)
    plain = rope.base ** (-2.0 * pairs / channels)
    if rope.scale is None or rope.factor is None:
        return plain
    if rope.scale == "linear":
        return plain / rope.factor
    assert rope.original is not None
    if rope.scale == "yarn":
        kept = _kept_by_yarn(rope, channels, pairs)
    else:
        kept = _kept_by_llama3(rope, plain)
    return kept * plain + (1 - kept) * plain / rope.factor


def _kept_by_llama3(rope: RopeOptions, plain: Tensor) -> Tensor:
    """Return each frequency's unscaled fraction: 0 for at most `low` rotations in an original row, 1 from `high` on."""
    turns = (rope.original or 1) * plain / (2 * math.pi)
    return ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)


def _kept_by_yarn(rope: RopeOptions, channels: int, pairs: Tensor) -> Tensor:
    """Return each frequency's unscaled fraction, which falls linearly over the channel pairs.

    It is 1 up to the pair with `fast` rotations in an original row, and 0 from the one with `slow` rotations on.
    """

    def place(turns: float) -> float:
        return channels * math.log((rope.original or 1) / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first = place(rope.fast)
    last = place(rope.slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, channels - 1)
    wide = last - first if last != first else 0.001
    return 1 - ((pairs - first) / wide).clamp(0, 1)


def rope_table(
    positions_BL: Tensor, head_dim: int, rope: RopeOptions, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, each (B, L, k), multiplied by YaRN's factor if there is one.

    fp32 angles would be off by 0.06 rad at position 1M, so they are formed and reduced in float64 (off by 1e-10).
    """
    angles_BLk = positions_BL.double()[..., None] * frequencies(rope, head_dim, positions_BL.device)
    reduced_BLk = angles_BLk.remainder(2 * math.pi)
    cos_BLk = reduced_BLk.cos()
    sin_BLk = reduced_BLk.sin()
    if (factor := rope.attention_factor) != 1:
        cos_BLk = cos_BLk * factor
        sin_BLk = sin_BLk * factor
    return cos_BLk.to(dtype), sin_BLk.to(dtype)


def apply_rope(inputs: RopeInputs) -> Tensor:
    """Rotate the channel pairs of every head by their token's angles; fp32 inside, the dtype of `x_BLHK` outside.

    If a head has more than 2 k channels, only the first 2 k are rotated.
    """
    x_BLHK, cos_BLk, sin_BLk = inputs
    rotary = 2 * cos_BLk.shape[-1]
    first, second = at_least_fp32(x_BLHK[..., :rotary]).chunk(2, dim=-1)
    cos = cos_BLk[:, :, None].to(first.dtype)
    sin = sin_BLk[:, :, None].to(first.dtype)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BLHK.dtype)
    if rotary == x_BLHK.shape[-1]:
        return rotated
    return torch.cat((rotated, x_BLHK[..., rotary:]), dim=-1)
