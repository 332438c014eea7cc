"""Root-mean-square norm and rotary positions.

    rms_norm:      y = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm:  s = x + added,  and the norm of s
    rotary:        (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a),  a = position * base^(-i / k)

Channel i of a head is paired with channel i + k, where k is half the head size ("rotate half"), as transformers' Llama
pairs them; the interleaved pairing of the original paper is a permutation of the same channels and not offered.
There is no scaling of frequencies for longer contexts here.

A residual stream may be wider than what is computed in: fp32 beside bf16 weights. Its norm is then as narrow as these.

Legend: B rows, L tokens, H heads, K head size, k half of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridtron.ops.dispatch import op


def at_least_fp32(x: Tensor) -> Tensor:
    """The tensor in fp32, or as it is where it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """That of two dtypes which the other can hold."""
    return one if torch.promote_types(one, other) == other else other


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32; returned in the narrower dtype of the two."""
    wide = at_least_fp32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(narrower(x.dtype, weight.dtype))


@op
def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A residual stream with what is added to it, and the norm of that sum, which is rounded first.

    The sum has the dtype of `x`, which is no narrower than that of `added`.
    """
    summed = x + added
    return summed, rms_norm(summed, weight, eps)


def rope_table(positions_BL: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (B, L, k) in fp32.

    fp32 angles would be off by 0.06 rad at position 1M, so they are formed and reduced in float64 (off by 1e-10).
    """
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=positions_BL.device)
    frequencies_k = base ** (-2.0 * pairs / head_dim)
    angles_BLk = positions_BL.double()[..., None] * frequencies_k
    reduced_BLk = angles_BLk.remainder(2 * math.pi)
    return reduced_BLk.cos().float(), reduced_BLk.sin().float()


@op
def apply_rope(x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor) -> Tensor:
    """Turn the channel pairs of every head by their token's angles; fp32 inside, the dtype of `x_BLHK` outside.

    Of more than 2 k channels the first 2 k are turned, and the others left.
    """
    turned = 2 * cos_BLk.shape[-1]
    first, second = at_least_fp32(x_BLHK[..., :turned]).chunk(2, dim=-1)
    cos, sin = cos_BLk[:, :, None].to(first.dtype), sin_BLk[:, :, None].to(first.dtype)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BLHK.dtype)
    return rotated if turned == x_BLHK.shape[-1] else torch.cat((rotated, x_BLHK[..., turned:]), dim=-1)
