"""A Triton kernel for the router's choice; `reference.py` has the rules.

A program has some tokens with the scores of all experts, and takes the largest score K times. torch would sort all
scores. NaN counts as infinity, unlike in the reference; a step with NaN is refused anyway. The kernel has run in
Triton's interpreter only.

Legend: T tokens, E experts, G groups, K experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.experts.reference import ChoiceInputs
from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2, tile_of_rows

ELEMENTS = 2048  # per program
WARP_ELEMENTS = 512  # 16 per thread
LEAST = tl.constexpr(-3.0e38)  # of experts outside the best groups: they come before channels that are no experts


def expert_choice(inputs: ChoiceInputs) -> Tensor:
    """Return each token's experts (T, K), in int64, the one with the largest corrected score first."""
    scores_TE = inputs.scores_TE.detach().contiguous()
    correction_E = None
    if inputs.correction_E is not None:
        correction_E = inputs.correction_E.detach().float().contiguous()
    tokens, experts = scores_TE.shape
    options = inputs.options
    experts_TK = torch.empty(tokens, options.top_k, dtype=torch.int64, device=scores_TE.device)
    rows, block, warps = tile_of_rows(experts, ELEMENTS, WARP_ELEMENTS)
    launch(
        _choose, (ceil_div(tokens, rows),), scores_TE, correction_E, experts_TK, tokens, experts, options.top_k,
        options.groups, options.group_limit, power_of_2(options.groups), rows, block, warps=warps,
    )  # fmt: skip
    return experts_TK


@triton.jit
def _first_largest(scores: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return each row's largest score, and the first index that has it."""
    best, index = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
    return best, index


@triton.jit
def _in_best_groups(
    scores: tl.tensor, e: tl.tensor, experts: int, GROUPS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return True for experts in the LIMIT groups with the largest sums of their two best scores."""
    size = experts // GROUPS
    group = tl.arange(0, BLOCK)
    worth = tl.full((TOKENS, BLOCK), float("-inf"), tl.float32)
    for g in range(GROUPS):
        inside = (e // size == g) & (e < experts)
        best, index = _first_largest(tl.where(inside[None, :], scores, float("-inf")))
        if size > 1:
            others = inside[None, :] & (e[None, :] != index[:, None])
            second, _ = _first_largest(tl.where(others, scores, float("-inf")))
            best += second
        worth = tl.where((group == g)[None, :], tl.maximum(best, LEAST)[:, None], worth)
    kept = (scores * 0.0) != 0.0
    for _ in range(LIMIT):
        _, index = _first_largest(worth)
        kept = kept | ((e // size)[None, :] == index[:, None])
        worth = tl.where(group[None, :] == index[:, None], float("-inf"), worth)
    return kept


@triton.jit
def _choose(
    scores_TE: tl.tensor, correction_E: tl.tensor, experts_TK: tl.tensor, tokens: int, experts: int, K: tl.constexpr,
    GROUPS: tl.constexpr, LIMIT: tl.constexpr, GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile's choices. Grid: tiles of tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    inside = (t < tokens)[:, None] & (e < experts)[None, :]
    scores = tl.load(scores_TE + t[:, None] * experts + e[None, :], inside, 0.0)
    if correction_E is not None:
        scores += tl.load(correction_E + e, e < experts, 0.0)[None, :]
    scores = tl.maximum(tl.where(scores == scores, scores, float("inf")), LEAST)
    if LIMIT < GROUPS:
        scores = tl.where(_in_best_groups(scores, e, experts, GROUPS, LIMIT, GROUP_BLOCK, TOKENS), scores, LEAST)
    scores = tl.where((e < experts)[None, :], scores, float("-inf"))
    for k in tl.static_range(K):
        _, index = _first_largest(scores)
        tl.store(experts_TK + t * K + k, index.to(tl.int64), t < tokens)
        scores = tl.where(e[None, :] == index[:, None], float("-inf"), scores)
