"""Triton kernels that add each head's bias to the keys and queries of its group, and rotate the sums.

For each head, R is the rotation by the head's angles, x is its group's key or query, and d = R^T dy. Let x1 and x2 be a
channel pair in x + bias, with the angle theta_s. y1 and y2, dy1 and dy2, d1 and d2 are the same pair in y, dy and d:

    y = R (x + bias),   dx = sum of d over the group's heads,   dbias = sum of d over tokens
    dtheta_s = y1 dy2 - y2 dy1 = x1 d2 - x2 d1

The last equation holds because x + bias and d become y and dy by the same rotation. The backward kernel computes the
right side, so y is not needed. Only the inputs are saved for the backward pass.

Each program in the backward kernel sums the bias gradients over its tokens, and `sum_kernels` adds up all programs'
sums. No kernel uses atomics, so results are deterministic. The kernels compute in fp32. They were checked on an H200
(benchmarks/gpu.md), when torch still added up these sums.

Legend: B rows (sequences in the batch), L tokens per row, H heads, G head groups, N channels per key or query, S angles
per head, T tokens per program, K programs per group. Inside kernels, the axis S of a tile (_TS, _1S) has all channel
pairs, padded to a power of two. The constant S is the number of angles; the pairs after the first S are not rotated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2
from hybridtron.ops.rotations.reference import TurnInputs
from hybridtron.ops.sum_kernels import sum_of_parts

TOKENS = 16  # tokens per program


def turn_pairs(inputs: TurnInputs) -> tuple[Tensor, Tensor]:
    """Return each head's rotated keys and queries. Gradients with respect to all inputs are supported."""
    return _TritonTurn.apply(*inputs)


class _TritonTurn(torch.autograd.Function):
    """Autograd function around both kernels. It saves only the inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *fields: Tensor) -> tuple[Tensor, Tensor]:
        fields = tuple(t.contiguous() for t in fields)
        ctx.save_for_backward(*fields)
        k_BLGN, q_BLGN, k_bias_HN, q_bias_HN, angles_BLHS = fields
        sizes = _sizes(k_BLGN, angles_BLHS)
        k_BLHN, q_BLHN = (x.new_empty(*angles_BLHS.shape[:3], x.shape[3]) for x in (k_BLGN, q_BLGN))
        launch(
            _turn, _grid(k_BLGN), k_BLGN, q_BLGN, k_bias_HN, q_bias_HN, angles_BLHS, k_BLHN, q_BLHN, *sizes,
            warps=_warps(k_BLGN),
        )  # fmt: skip
        return k_BLHN, q_BLHN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        fields = ctx.saved_tensors
        k_BLGN, _, *biases, angles_BLHS = fields
        grid = _grid(k_BLGN)
        contiguous = tuple(grad.contiguous() for grad in grads)
        of_tokens = [torch.empty_like(x) for x in fields[:2]]
        of_biases = [angles_BLHS.new_empty(grid[0] * grid[2], *bias.shape) for bias in biases]
        of_angles = torch.empty_like(angles_BLHS)
        launch(
            _turn_back, grid, *fields, *contiguous, *of_tokens, *of_biases, of_angles, *_sizes(k_BLGN, angles_BLHS),
            warps=_warps(k_BLGN),
        )  # fmt: skip
        summed = (
            sum_of_parts(share.flatten(1).unsqueeze(0), bias.dtype).view_as(bias)
            for share, bias in zip(of_biases, biases, strict=True)
        )
        return *of_tokens, *summed, of_angles


def _grid(k_BLGN: Tensor) -> tuple[int, int, int]:
    rows, length, groups, _ = k_BLGN.shape
    return ceil_div(length, TOKENS), groups, rows


def _warps(k_BLGN: Tensor) -> int:
    """Return a number of warps per program with which ptxas spills no registers on an H100."""
    return 4 if k_BLGN.shape[3] <= 128 else 8


def _sizes(k_BLGN: Tensor, angles_BLHS: Tensor) -> tuple[int, ...]:
    """Return the last arguments for both kernels: L, H, heads per group, N, S, TOKENS, and padded channel pairs."""
    _, length, groups, size = k_BLGN.shape
    heads, angles = angles_BLHS.shape[2:]
    return length, heads, heads // groups, size, angles, TOKENS, power_of_2(ceil_div(size, 2))


@triton.jit
def _turn(
    k_BLGN: tl.tensor, q_BLGN: tl.tensor, k_bias_HN: tl.tensor, q_bias_HN: tl.tensor, angles_BLHS: tl.tensor,
    k_BLHN: tl.tensor, q_BLHN: tl.tensor, length: int, heads: int, of_group: int, N: tl.constexpr, S: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the rotated keys and queries for TOKENS tokens and all heads in a group.

    Grid: (token blocks, groups, rows). The group's keys and queries are loaded once and rotated for each head.
    """
    group = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    s_1S = tl.arange(0, PAIRS)[None, :]
    at_T1 = (row * length + token_T)[:, None]
    inside_T1 = (token_T < length)[:, None]
    group_TS = (at_T1 * tl.num_programs(1) + group) * N + 2 * s_1S
    k1_TS, k2_TS = _pairs(k_BLGN + group_TS, inside_T1, s_1S, N)
    q1_TS, q2_TS = _pairs(q_BLGN + group_TS, inside_T1, s_1S, N)
    for head in range(group * of_group, (group + 1) * of_group):
        at_TS = at_T1 * heads + head
        cos_TS, sin_TS = _turns(angles_BLHS + at_TS * S + s_1S, inside_T1 & (s_1S < S))
        first_1S, second_1S = _pairs(k_bias_HN + head * N + 2 * s_1S, s_1S >= 0, s_1S, N)
        first_TS = k1_TS + first_1S
        second_TS = k2_TS + second_1S
        _store_turned(k_BLHN + at_TS * N + 2 * s_1S, first_TS, second_TS, cos_TS, sin_TS, inside_T1, s_1S, N)
        first_1S, second_1S = _pairs(q_bias_HN + head * N + 2 * s_1S, s_1S >= 0, s_1S, N)
        first_TS = q1_TS + first_1S
        second_TS = q2_TS + second_1S
        _store_turned(q_BLHN + at_TS * N + 2 * s_1S, first_TS, second_TS, cos_TS, sin_TS, inside_T1, s_1S, N)


@triton.jit
def _turn_back(
    k_BLGN: tl.tensor, q_BLGN: tl.tensor, k_bias_HN: tl.tensor, q_bias_HN: tl.tensor, angles_BLHS: tl.tensor,
    dk_BLHN: tl.tensor, dq_BLHN: tl.tensor, grad_k_BLGN: tl.tensor, grad_q_BLGN: tl.tensor, grad_k_bias_KHN: tl.tensor,
    grad_q_bias_KHN: tl.tensor, grad_angles_BLHS: tl.tensor, length: int, heads: int, of_group: int, N: tl.constexpr,
    S: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    """Store all gradients for TOKENS tokens and all heads in a group. Grid: (token blocks, groups, rows).

    The stored bias gradients are sums over the program's tokens.
    """
    group = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    s_1S = tl.arange(0, PAIRS)[None, :]
    at_T1 = (row * length + token_T)[:, None]
    inside_T1 = (token_T < length)[:, None]
    group_TS = (at_T1 * tl.num_programs(1) + group) * N + 2 * s_1S
    k1_TS, k2_TS = _pairs(k_BLGN + group_TS, inside_T1, s_1S, N)
    q1_TS, q2_TS = _pairs(q_BLGN + group_TS, inside_T1, s_1S, N)
    of_k1_TS = tl.zeros([TOKENS, PAIRS], tl.float32)
    of_k2_TS = tl.zeros([TOKENS, PAIRS], tl.float32)
    of_q1_TS = tl.zeros([TOKENS, PAIRS], tl.float32)
    of_q2_TS = tl.zeros([TOKENS, PAIRS], tl.float32)
    share = (row * tl.num_programs(0) + tl.program_id(0)) * heads
    for head in range(group * of_group, (group + 1) * of_group):
        at_TS = at_T1 * heads + head
        at_1S = head * N + 2 * s_1S
        cos_TS, sin_TS = _turns(angles_BLHS + at_TS * S + s_1S, inside_T1 & (s_1S < S))
        d1_TS, d2_TS = _turned_back(dk_BLHN + at_TS * N + 2 * s_1S, cos_TS, sin_TS, inside_T1, s_1S, N)
        of_k1_TS += d1_TS
        of_k2_TS += d2_TS
        _store_sums(grad_k_bias_KHN + share * N + at_1S, d1_TS, d2_TS, s_1S, N)
        first_1S, second_1S = _pairs(k_bias_HN + at_1S, s_1S >= 0, s_1S, N)
        of_angle_TS = (k1_TS + first_1S) * d2_TS - (k2_TS + second_1S) * d1_TS
        d1_TS, d2_TS = _turned_back(dq_BLHN + at_TS * N + 2 * s_1S, cos_TS, sin_TS, inside_T1, s_1S, N)
        of_q1_TS += d1_TS
        of_q2_TS += d2_TS
        _store_sums(grad_q_bias_KHN + share * N + at_1S, d1_TS, d2_TS, s_1S, N)
        first_1S, second_1S = _pairs(q_bias_HN + at_1S, s_1S >= 0, s_1S, N)
        of_angle_TS += (q1_TS + first_1S) * d2_TS - (q2_TS + second_1S) * d1_TS
        tl.store(grad_angles_BLHS + at_TS * S + s_1S, of_angle_TS, mask=inside_T1 & (s_1S < S))
    _store_pairs(grad_k_BLGN + group_TS, of_k1_TS, of_k2_TS, inside_T1, s_1S, N)
    _store_pairs(grad_q_BLGN + group_TS, of_q1_TS, of_q2_TS, inside_T1, s_1S, N)


@triton.jit
def _pairs(place: tl.tensor, inside: tl.tensor, s_1S: tl.tensor, N: tl.constexpr) -> tuple:
    """Load each pair's first and second channel, in fp32; channels from N on are 0."""
    first = tl.load(place, mask=inside & (2 * s_1S < N), other=0.0).to(tl.float32)
    second = tl.load(place + 1, mask=inside & (2 * s_1S + 1 < N), other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    place: tl.tensor, first: tl.tensor, second: tl.tensor, inside: tl.tensor, s_1S: tl.tensor, N: tl.constexpr
) -> None:
    """Store each pair's first and second channel."""
    tl.store(place, first, mask=inside & (2 * s_1S < N))
    tl.store(place + 1, second, mask=inside & (2 * s_1S + 1 < N))


@triton.jit
def _turns(place: tl.tensor, inside: tl.tensor) -> tuple:
    """Load a head's angles, and return their cos and sin. Where `inside` is False, the angle is 0.

    A multiple of pi / 2 is subtracted from each angle, so that the remainder is between -pi / 4 and pi / 4. For this,
    pi / 2 is written as a sum of three numbers. The first two numbers have so few bits that their multiples are exact.
    Polynomials then give the remainder's sin and cos. The error is below 1e-7 for angles up to 50,000 rad. CUDA's own
    functions are not used, since they reserve local memory for larger angles.
    """
    angle = tl.load(place, mask=inside, other=0.0)
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = ((angle - quarters * 1.5703125) - quarters * 0.00048351287841796875) - quarters * 3.13916478589249e-07
    y = x * x
    sin = x + x * y * (-0.16666664183 + y * (0.0083327461034 + y * -0.00019587446877))
    cos = 1.0 - 0.5 * y + y * y * (0.041666664183 + y * (-0.0013888301328 + y * 0.000024547487556))
    quarter = quarters.to(tl.int32)
    odd = (quarter & 1) != 0
    unsigned_cos = tl.where(odd, sin, cos)
    unsigned_sin = tl.where(odd, cos, sin)
    signed_cos = tl.where(((quarter + 1) & 2) != 0, -unsigned_cos, unsigned_cos)
    return signed_cos, tl.where((quarter & 2) != 0, -unsigned_sin, unsigned_sin)


@triton.jit
def _store_turned(
    place: tl.tensor, first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, inside: tl.tensor,
    s_1S: tl.tensor, N: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate channel pairs and store them."""
    _store_pairs(place, first * cos - second * sin, first * sin + second * cos, inside, s_1S, N)


@triton.jit
def _turned_back(
    place: tl.tensor, cos: tl.tensor, sin: tl.tensor, inside: tl.tensor, s_1S: tl.tensor, N: tl.constexpr,
) -> tuple:  # fmt: skip
    """Load the gradient dy for a head's output, and return d = R^T dy."""
    first, second = _pairs(place, inside, s_1S, N)
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def _store_sums(place: tl.tensor, first_TS: tl.tensor, second_TS: tl.tensor, s_1S: tl.tensor, N: tl.constexpr) -> None:
    """Sum each pair's two channels over the tokens, and store the sums."""
    first_1S = tl.expand_dims(tl.sum(first_TS, axis=0), 0)
    second_1S = tl.expand_dims(tl.sum(second_TS, axis=0), 0)
    _store_pairs(place, first_1S, second_1S, s_1S >= 0, s_1S, N)
