"""Triton kernels that order choices by expert, by counting instead of sorting; `permutation.py` has the equations.

    rank[n]       number of earlier choices of the same expert in the same part of the choices
    start[p, e]   place of part p's first choice of expert e: after all choices of earlier experts, and after the
                  choices of expert e in earlier parts
    place[n] = start[part of n, expert of n] + rank[n]

The first kernel counts each part, the second adds counts over parts, and the third stores places. All numbers are
integers, and no place is stored twice. The kernels have run in Triton's interpreter only.

Legend: T tokens, K experts per token, N = T K choices, E experts, P parts of the choices, C choices per tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridtron.ops.experts.permutation import ExpertOrder, ExpertOrderInputs
from hybridtron.ops.kernel_launch import ceil_div, launch, tile_of_rows

ELEMENTS = 4096  # choices times experts in a tile
WARP_ELEMENTS = 1024  # 32 per thread
MIN_PART = 256  # least number of choices in a part
EXPERTS_TOGETHER = 4  # experts whose counts one program adds
PARTS_TOGETHER = 128  # parts whose counts one program adds at a time
PLACED = 1024  # choices that one program places


def expert_order(inputs: ExpertOrderInputs) -> ExpertOrder:
    """Return the order of all choices by expert."""
    experts_TK = inputs.experts_TK.contiguous()
    loads_E = inputs.loads_E.contiguous()
    choices = experts_TK.numel()
    experts = len(loads_E)
    tile, block, warps = tile_of_rows(experts, ELEMENTS, WARP_ELEMENTS)
    rounds = max(1, MIN_PART // tile)
    parts = ceil_div(choices, tile * rounds)
    rank_N = torch.empty(choices, dtype=torch.int32, device=loads_E.device)
    count_PE = torch.empty(parts, experts, dtype=torch.int32, device=loads_E.device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=loads_E.device)
    place_TK = torch.empty_like(experts_TK)
    source_N = torch.empty(choices, dtype=torch.int64, device=loads_E.device)
    launch(_count, (parts,), experts_TK, rank_N, count_PE, choices, experts, rounds, tile, block, warps=warps)
    grid = (ceil_div(experts, EXPERTS_TOGETHER),)
    launch(_starts, grid, count_PE, loads_E, ends_E, parts, experts, PARTS_TOGETHER, EXPERTS_TOGETHER, block, warps=4)
    grid = (ceil_div(choices, PLACED),)
    launch(
        _place, grid, experts_TK, rank_N, count_PE, place_TK, source_N, choices, experts, tile * rounds, PLACED, warps=4
    )
    return ExpertOrder(source_N, place_TK, ends_E)


@triton.jit
def _count(
    experts_N: tl.tensor, rank_N: tl.tensor, count_PE: tl.tensor, choices: int, experts: int, ROUNDS: tl.constexpr,
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the ranks of a part's choices, and its number of choices of each expert. Grid: parts."""
    part = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    count_E = tl.zeros((EXPERTS,), tl.int32)
    for r in range(ROUNDS):
        n = (part * ROUNDS + r) * CHOICES + tl.arange(0, CHOICES)
        expert_C = tl.load(experts_N + n, n < choices, -1)
        is_choice_of = (expert_C[:, None] == e[None, :]).to(tl.int32)
        earlier = count_E[None, :] + tl.cumsum(is_choice_of, 0) - is_choice_of
        tl.store(rank_N + n, tl.sum(earlier * is_choice_of, 1), n < choices)
        count_E += tl.sum(is_choice_of, 0)
    tl.store(count_PE + part * experts + e, count_E, e < experts)


@triton.jit
def _starts(
    count_PE: tl.tensor, loads_E: tl.tensor, ends_E: tl.tensor, parts: int, experts: int, PARTS: tl.constexpr,
    TOGETHER: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Replace the counts of some experts by their `start`, and store the experts' ends. Grid: tiles of experts."""
    e = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    other = tl.arange(0, EXPERTS)
    loads = tl.load(loads_E + other, other < experts, 0).to(tl.int32)
    end = tl.sum(tl.where(other[None, :] <= e[:, None], loads[None, :], 0), 1)
    tl.store(ends_E + e, end, e < experts)
    start = tl.sum(tl.where(other[None, :] < e[:, None], loads[None, :], 0), 1)
    for first in range(0, parts, PARTS):
        p = (first + tl.arange(0, PARTS)).to(tl.int64)
        inside = (p < parts)[:, None] & (e < experts)[None, :]
        at = p[:, None] * experts + e[None, :]
        count = tl.load(count_PE + at, inside, 0)
        tl.store(count_PE + at, start[None, :] + tl.cumsum(count, 0) - count, inside)
        start += tl.sum(count, 0)


@triton.jit
def _place(
    experts_N: tl.tensor, rank_N: tl.tensor, start_PE: tl.tensor, place_N: tl.tensor, source_N: tl.tensor, choices: int,
    experts: int, PART_CHOICES: tl.constexpr, CHOICES: tl.constexpr,
) -> None:  # fmt: skip
    """Store the places of some choices, and the choices at these places. Grid: tiles of choices."""
    n = tl.program_id(0).to(tl.int64) * CHOICES + tl.arange(0, CHOICES)
    expert = tl.load(experts_N + n, n < choices, 0)
    start = tl.load(start_PE + (n // PART_CHOICES) * experts + expert, n < choices, 0)
    place = (start + tl.load(rank_N + n, n < choices, 0)).to(tl.int64)
    tl.store(place_N + n, place, n < choices)
    tl.store(source_N + place, n, n < choices)
