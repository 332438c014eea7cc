"""Keys and queries of heads by Triton: each token's group is read once, and all its heads written once.

    y = R (x + bias), by head:   dx = sum over a group's heads of R^T dy,   dbias = sum over tokens of R^T dy
    dtheta_s = y1 dy2 - y2 dy1 of pair s, which a turn leaves as it is: with d = R^T dy, x1 d2 - x2 d1, bias included

Backward keeps the inputs alone. A program of it adds up the gradient of bias over some
tokens; their sums are added up by torch, in a fixed order. fp32 inside. Right on an H200 (benchmarks/gpu.md).

Legend: as in `reference`; T tokens of a program, R heads of a group, S pairs of channels that turn or not (N = 2 S); K
programs along the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2
from hybridtron.ops.turns.reference import TurnInputs

TOKENS = 16  # of a program


def turn_pairs(inputs: TurnInputs) -> tuple[Tensor, Tensor]:
    """Keys and queries by head, with a backward pass."""
    return _TritonTurn.apply(*inputs)


class _TritonTurn(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Tensor) -> tuple[Tensor, Tensor]:
        fields = tuple(t.contiguous() for t in fields)
        ctx.save_for_backward(*fields)
        k_BLGN, q_BLGN, k_bias_HN, q_bias_HN, angles_BLHS = fields
        sizes = _sizes(k_BLGN, angles_BLHS)
        made = tuple(x.new_empty(*angles_BLHS.shape[:3], x.shape[3]) for x in (k_BLGN, q_BLGN))
        launch(
            _turn, _grid(k_BLGN), k_BLGN, q_BLGN, k_bias_HN, q_bias_HN, angles_BLHS, *made, *sizes, warps=_warps(k_BLGN)
        )
        return made[0], made[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        fields = ctx.saved_tensors
        k_BLGN, _, *biases, angles_BLHS = fields
        grid, contiguous = _grid(k_BLGN), tuple(grad.contiguous() for grad in grads)
        of_tokens = [torch.empty_like(x) for x in fields[:2]]
        of_biases = [angles_BLHS.new_empty(grid[0] * grid[2], *bias.shape) for bias in biases]
        of_angles = torch.empty_like(angles_BLHS)
        launch(
            _turn_back, grid, *fields, *contiguous, *of_tokens, *of_biases, of_angles, *_sizes(k_BLGN, angles_BLHS),
            warps=_warps(k_BLGN),
        )  # fmt: skip
        summed = (share.sum(0).to(bias.dtype) for share, bias in zip(of_biases, biases, strict=True))
        return *of_tokens, *summed, of_angles


def _grid(k_BLGN: Tensor) -> tuple[int, int, int]:
    rows, length, groups, _ = k_BLGN.shape
    return ceil_div(length, TOKENS), groups, rows


def _warps(k_BLGN: Tensor) -> int:
    """Of a program, such that ptxas spills no registers for an H100."""
    return 4 if k_BLGN.shape[3] <= 128 else 8


def _sizes(k_BLGN: Tensor, angles_BLHS: Tensor) -> tuple[int, ...]:
    """L, H, heads of a group, N, angles, tokens of a program and pairs of channels, padded."""
    _, length, groups, size = k_BLGN.shape
    heads, angles = angles_BLHS.shape[2:]
    return length, heads, heads // groups, size, angles, TOKENS, power_of_2(ceil_div(size, 2))


@triton.jit
def _turn(
    k_BLGN: tl.tensor, q_BLGN: tl.tensor, k_bias_HN: tl.tensor, q_bias_HN: tl.tensor, angles_BLHS: tl.tensor,
    k_BLHN: tl.tensor, q_BLHN: tl.tensor, length: int, heads: int, of_group: int, N: tl.constexpr, S: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    """Keys and queries of some tokens, all heads of a group."""
    group, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T, s_1S = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PAIRS)[None, :]
    at_T1, inside_T1 = (row * length + token_T)[:, None], (token_T < length)[:, None]
    given_TS = (at_T1 * tl.num_programs(1) + group) * N + 2 * s_1S
    k1_TS, k2_TS = _pairs(k_BLGN + given_TS, inside_T1, s_1S, N)
    q1_TS, q2_TS = _pairs(q_BLGN + given_TS, inside_T1, s_1S, N)
    for head in range(group * of_group, (group + 1) * of_group):
        at_TS = at_T1 * heads + head
        cos_TS, sin_TS = _turns(angles_BLHS + at_TS * S + s_1S, inside_T1 & (s_1S < S))
        one_1S, other_1S = _pairs(k_bias_HN + head * N + 2 * s_1S, s_1S >= 0, s_1S, N)
        one_TS, other_TS = k1_TS + one_1S, k2_TS + other_1S
        _store_turned(k_BLHN + at_TS * N + 2 * s_1S, one_TS, other_TS, cos_TS, sin_TS, inside_T1, s_1S, N)
        one_1S, other_1S = _pairs(q_bias_HN + head * N + 2 * s_1S, s_1S >= 0, s_1S, N)
        one_TS, other_TS = q1_TS + one_1S, q2_TS + other_1S
        _store_turned(q_BLHN + at_TS * N + 2 * s_1S, one_TS, other_TS, cos_TS, sin_TS, inside_T1, s_1S, N)


@triton.jit
def _turn_back(
    k_BLGN: tl.tensor, q_BLGN: tl.tensor, k_bias_HN: tl.tensor, q_bias_HN: tl.tensor, angles_BLHS: tl.tensor,
    dk_BLHN: tl.tensor, dq_BLHN: tl.tensor, grad_k_BLGN: tl.tensor, grad_q_BLGN: tl.tensor, grad_k_bias_KHN: tl.tensor,
    grad_q_bias_KHN: tl.tensor, grad_angles_BLHS: tl.tensor, length: int, heads: int, of_group: int, N: tl.constexpr,
    S: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    """All gradients of some tokens and all heads of a group; that of bias is these tokens' share."""
    group, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T, s_1S = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PAIRS)[None, :]
    at_T1, inside_T1 = (row * length + token_T)[:, None], (token_T < length)[:, None]
    given_TS = (at_T1 * tl.num_programs(1) + group) * N + 2 * s_1S
    k1_TS, k2_TS = _pairs(k_BLGN + given_TS, inside_T1, s_1S, N)
    q1_TS, q2_TS = _pairs(q_BLGN + given_TS, inside_T1, s_1S, N)
    of_k1_TS, of_k2_TS = tl.zeros([TOKENS, PAIRS], tl.float32), tl.zeros([TOKENS, PAIRS], tl.float32)
    of_q1_TS, of_q2_TS = tl.zeros([TOKENS, PAIRS], tl.float32), tl.zeros([TOKENS, PAIRS], tl.float32)
    share = (row * tl.num_programs(0) + tl.program_id(0)) * heads
    for head in range(group * of_group, (group + 1) * of_group):
        at_TS, at_1S = at_T1 * heads + head, head * N + 2 * s_1S
        cos_TS, sin_TS = _turns(angles_BLHS + at_TS * S + s_1S, inside_T1 & (s_1S < S))
        d1_TS, d2_TS = _turned_back(dk_BLHN + at_TS * N + 2 * s_1S, cos_TS, sin_TS, inside_T1, s_1S, N)
        of_k1_TS, of_k2_TS = of_k1_TS + d1_TS, of_k2_TS + d2_TS
        _store_sums(grad_k_bias_KHN + share * N + at_1S, d1_TS, d2_TS, s_1S, N)
        one_1S, other_1S = _pairs(k_bias_HN + at_1S, s_1S >= 0, s_1S, N)
        of_angle_TS = (k1_TS + one_1S) * d2_TS - (k2_TS + other_1S) * d1_TS
        d1_TS, d2_TS = _turned_back(dq_BLHN + at_TS * N + 2 * s_1S, cos_TS, sin_TS, inside_T1, s_1S, N)
        of_q1_TS, of_q2_TS = of_q1_TS + d1_TS, of_q2_TS + d2_TS
        _store_sums(grad_q_bias_KHN + share * N + at_1S, d1_TS, d2_TS, s_1S, N)
        one_1S, other_1S = _pairs(q_bias_HN + at_1S, s_1S >= 0, s_1S, N)
        of_angle_TS += (q1_TS + one_1S) * d2_TS - (q2_TS + other_1S) * d1_TS
        tl.store(grad_angles_BLHS + at_TS * S + s_1S, of_angle_TS, mask=inside_T1 & (s_1S < S))
    _store_pairs(grad_k_BLGN + given_TS, of_k1_TS, of_k2_TS, inside_T1, s_1S, N)
    _store_pairs(grad_q_BLGN + given_TS, of_q1_TS, of_q2_TS, inside_T1, s_1S, N)


@triton.jit
def _pairs(place: tl.tensor, there: tl.tensor, s_1S: tl.tensor, N: tl.constexpr) -> tuple:
    """The first and the second channel of each pair, zeros beyond."""
    one = tl.load(place, mask=there & (2 * s_1S < N), other=0.0).to(tl.float32)
    return one, tl.load(place + 1, mask=there & (2 * s_1S + 1 < N), other=0.0).to(tl.float32)


@triton.jit
def _store_pairs(
    place: tl.tensor, one: tl.tensor, other: tl.tensor, there: tl.tensor, s_1S: tl.tensor, N: tl.constexpr
) -> None:
    tl.store(place, one, mask=there & (2 * s_1S < N))
    tl.store(place + 1, other, mask=there & (2 * s_1S + 1 < N))


@triton.jit
def _turns(place: tl.tensor, there: tl.tensor) -> tuple:
    """cos and sin of the angles of a head; beyond them, channels stay as they are.

    Both from one reduction to an eighth of a turn either way, with pi / 2 in three parts of which two have few bits,
    and polynomials fitted there: within 1e-7 for angles up to 50,000. The library's own reserve memory for larger ones.
    """
    angle = tl.load(place, mask=there, other=0.0)
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = ((angle - quarters * 1.5703125) - quarters * 0.00048351287841796875) - quarters * 3.13916478589249e-07
    y = x * x
    sin = x + x * y * (-0.16666664183 + y * (0.0083327461034 + y * -0.00019587446877))
    cos = 1.0 - 0.5 * y + y * y * (0.041666664183 + y * (-0.0013888301328 + y * 0.000024547487556))
    quarter = quarters.to(tl.int32)
    odd = (quarter & 1) != 0
    one, other = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -one, one), tl.where((quarter & 2) != 0, -other, other)


@triton.jit
def _store_turned(
    place: tl.tensor, one: tl.tensor, other: tl.tensor, cos: tl.tensor, sin: tl.tensor, there: tl.tensor,
    s_1S: tl.tensor, N: tl.constexpr,
) -> None:  # fmt: skip
    _store_pairs(place, one * cos - other * sin, one * sin + other * cos, there, s_1S, N)


@triton.jit
def _turned_back(
    place: tl.tensor, cos: tl.tensor, sin: tl.tensor, there: tl.tensor, s_1S: tl.tensor, N: tl.constexpr,
) -> tuple:  # fmt: skip
    """Gradients of a head, before its turn."""
    one, other = _pairs(place, there, s_1S, N)
    return one * cos + other * sin, other * cos - one * sin


@triton.jit
def _store_sums(place: tl.tensor, one_TS: tl.tensor, other_TS: tl.tensor, s_1S: tl.tensor, N: tl.constexpr) -> None:
    """Sums over the tokens."""
    one_1S, other_1S = tl.expand_dims(tl.sum(one_TS, axis=0), 0), tl.expand_dims(tl.sum(other_TS, axis=0), 0)
    _store_pairs(place, one_1S, other_1S, s_1S >= 0, s_1S, N)
