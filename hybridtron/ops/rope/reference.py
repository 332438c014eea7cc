"""Rotary positions (RoPE): each pair of channels is rotated by an angle that grows with the token's position.

    (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a),  a = position * f_i,  f_i = base^(-i / k)

x1 is channel i of a head, and x2 is channel i + k, for i from 0 to k - 1 ("rotate half"), as in Llama in transformers.
The original paper pairs channels 2 * i and 2 * i + 1, which is not supported. If a query is rotated by the angle a, and
a key is rotated by the angle b, their attention score depends only on a - b, that is, on their tokens' distance.

For rows that are longer than in the original training, the frequencies f can be scaled by the rules in
`architecture/rope.py`. YaRN also multiplies cos and sin by a factor.

Legend: B rows (sequences in the batch), L tokens per row, H heads, K channels per head, k half of the rotated channels
(K / 2 if all channels are rotated).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.architecture.rope import RopeOptions
from hybridtron.ops.precision import at_least_fp32


class RopeInputs(NamedTuple):
    """Queries or keys, and cos and sin of each token's angles, as `rope_table` returns them."""

    x_BLHK: Tensor
    cos_BLk: Tensor
    sin_BLk: Tensor


def frequencies(rope: RopeOptions, channels: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the frequencies f (k,) in radians per position, in float64, scaled as `rope` says.

    `channels` is the number of rotated channels, 2 * k.
    """
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
    """Return the weight w for each frequency f: the scaled frequency is w f + (1 - w) f / factor.

    The turns of a frequency are its full rotations in a row with the original length. The weight is 0 up to `low`
    turns, 1 from `high` turns on, and linear in the turns in between.
    """
    turns = (rope.original or 1) * plain / (2 * math.pi)
    return ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)


def _kept_by_yarn(rope: RopeOptions, channels: int, pairs: Tensor) -> Tensor:
    """Return the weight w for each frequency f: the scaled frequency is w f + (1 - w) f / factor.

    The turns of a frequency are its full rotations in a row with the original length. `fast` and `slow` are numbers of
    turns. A channel pair with at least `fast` turns has the weight 1, and a pair with at most `slow` turns has the
    weight 0. In between, the weight is linear in the pair's index.
    """

    def place(turns: float) -> float:
        return channels * math.log((rope.original or 1) / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first = place(rope.fast)
    last = place(rope.slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    # the limits of YaRN's published code, although the last pair has the index channels / 2 - 1
    first = max(first, 0)
    last = min(last, channels - 1)
    wide = last - first if last != first else 0.001  # no division by zero
    return 1 - ((pairs - first) / wide).clamp(0, 1)


def rope_table(
    positions_BL: Tensor, head_dim: int, rope: RopeOptions, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, each (B, L, k), multiplied by YaRN's factor if there is one.

    `head_dim` is the number of rotated channels, 2 * k. Angles are computed in float64, and reduced to [0, 2 pi) before
    cos and sin. At position 1 million an angle's error is 1e-10 rad; in fp32 it would be 0.06 rad.
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
    """Return x with the channel pairs of each head rotated by its token's angles.

    The computation is in fp32 (float64 for float64 inputs), and the result has x's dtype. If a head has more than 2 * k
    channels, only the first 2 * k channels are rotated.
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
