"""Triton kernels of the router: scores, choice, weights, loads and entropy, and the gradients of the logits.

`reference.py` has the rules, and `routing.py` has the gradients of the chosen scores. The gradient of the logits z
follows from the gradient g of all scores s:

    softmax: grad z = s (g - sum over e of g_e s_e),   sigmoid: grad z = g s (1 - s)

A program handles some tokens with the scores of all experts, and takes the largest score K times; torch would sort all
scores. The program stores the loads and the entropy of its tile. A second kernel adds the loads and entropies of all
tiles in a fixed order, without atomics. For the choice, NaN counts as infinity, unlike in the reference; a step with
NaN is refused anyway. The kernels have run in Triton's interpreter only.

Legend: T tokens, E experts, K experts per token, N tiles of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.experts.reference import TINY, Router, Routing
from hybridtron.ops.experts.routing import RouteInputs
from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2, tile_of_rows
from hybridtron.ops.precision import at_least_fp32

ELEMENTS = 2048  # per program
WARP_ELEMENTS = 512  # 16 per thread
TILES_TOGETHER = 256  # tiles whose loads one program adds at a time
EXPERTS_TOGETHER = 4  # experts whose loads one program adds
LEAST = tl.constexpr(-3.0e38)  # score of experts outside the best groups; channels that are no experts have -inf
LITTLE = tl.constexpr(TINY)


def route(inputs: RouteInputs) -> Routing:
    """Choose each token's experts and their weights."""
    correction_E = None
    if inputs.correction_E is not None:
        correction_E = inputs.correction_E.detach().float().contiguous()
    logits_TE = at_least_fp32(inputs.logits_TE).contiguous()
    return Routing(*_Route.apply(logits_TE, correction_E, inputs.options))


class _Route(torch.autograd.Function):
    """Autograd function that saves the scores and the choice."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, correction_E: Tensor | None, options: Router
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        tokens, experts = logits_TE.shape
        rows, block, warps = tile_of_rows(experts, ELEMENTS, WARP_ELEMENTS)
        tiles = ceil_div(tokens, rows)
        scores_TE = torch.empty_like(logits_TE)
        experts_TK = torch.empty(tokens, options.top_k, dtype=torch.int64, device=logits_TE.device)
        weights_TK = logits_TE.new_empty(tokens, options.top_k)
        loads_NE = torch.empty(tiles, experts, dtype=torch.int32, device=logits_TE.device)
        entropies_N = logits_TE.new_empty(tiles)
        launch(
            _choose, (tiles,), logits_TE, correction_E, scores_TE, experts_TK, weights_TK, loads_NE, entropies_N,
            tokens, experts, options.scale, options.top_k, options.groups, options.group_limit,
            power_of_2(options.groups), power_of_2(options.top_k), options.scores == "softmax", options.normalise,
            rows, block, warps=warps,
        )  # fmt: skip
        loads_E = torch.empty(experts, dtype=torch.int64, device=logits_TE.device)
        entropy = torch.empty((), dtype=torch.float64, device=logits_TE.device)
        launch(
            _total, (ceil_div(experts, EXPERTS_TOGETHER),), loads_NE, entropies_N, loads_E, entropy, tiles, experts,
            TILES_TOGETHER, EXPERTS_TOGETHER, warps=4,
        )  # fmt: skip
        ctx.options = options
        ctx.save_for_backward(scores_TE, experts_TK)
        ctx.mark_non_differentiable(experts_TK, loads_E, entropy)
        ctx.set_materialize_grads(False)  # no zeros for a router whose scores have no loss
        return experts_TK, weights_TK, loads_E, scores_TE, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        _, grad_weights_TK, _, grad_scores_TE, _ = grads
        if grad_weights_TK is None and grad_scores_TE is None:
            return None, None, None
        scores_TE, experts_TK = ctx.saved_tensors
        options: Router = ctx.options
        grad_logits_TE = torch.empty_like(scores_TE)
        tokens, experts = scores_TE.shape
        rows, block, warps = tile_of_rows(experts, ELEMENTS, WARP_ELEMENTS)
        launch(
            _logit_gradients, (ceil_div(tokens, rows),), scores_TE, experts_TK, _contiguous(grad_weights_TK),
            _contiguous(grad_scores_TE), grad_logits_TE, tokens, experts, options.scale, options.top_k,
            options.scores == "softmax", options.normalise, rows, block, warps=warps,
        )  # fmt: skip
        return grad_logits_TE, None, None


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.contiguous()


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
    kept = tl.zeros_like(scores) != 0.0  # no expert yet
    for _ in range(LIMIT):
        _, index = _first_largest(worth)
        kept = kept | ((e // size)[None, :] == index[:, None])
        worth = tl.where(group[None, :] == index[:, None], float("-inf"), worth)
    return kept


@triton.jit
def _scores(logits: tl.tensor, is_expert: tl.tensor, SOFTMAX: tl.constexpr) -> tl.tensor:
    """Return the scores of a tile, 0 for channels that are no experts."""
    logits = tl.where(is_expert[None, :], logits, float("-inf"))
    if SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    else:
        scores = tl.sigmoid(logits)
    return scores


@triton.jit
def _choose(
    logits_TE: tl.tensor, correction_E: tl.tensor, scores_TE: tl.tensor, experts_TK: tl.tensor, weights_TK: tl.tensor,
    loads_NE: tl.tensor, entropies_N: tl.tensor, tokens: int, experts: int, scale: float, K: tl.constexpr,
    GROUPS: tl.constexpr, LIMIT: tl.constexpr, GROUP_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile's scores, choices and weights, its loads and its entropy. Grid: N tiles of tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    k_K = tl.arange(0, K_BLOCK)
    inside = (t < tokens)[:, None] & (e < experts)[None, :]
    logits = tl.load(logits_TE + t[:, None] * experts + e[None, :], inside, 0.0)
    scores = _scores(logits, e < experts, SOFTMAX)
    tl.store(scores_TE + t[:, None] * experts + e[None, :], scores, inside)
    ranked = scores
    if correction_E is not None:
        ranked += tl.load(correction_E + e, e < experts, 0.0)[None, :]
    ranked = tl.maximum(tl.where(ranked == ranked, ranked, float("inf")), LEAST)
    if LIMIT < GROUPS:
        ranked = tl.where(_in_best_groups(ranked, e, experts, GROUPS, LIMIT, GROUP_BLOCK, TOKENS), ranked, LEAST)
    ranked = tl.where((e < experts)[None, :], ranked, float("-inf"))
    weights = tl.zeros((TOKENS, K_BLOCK), tl.float32)
    chosen = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for k in tl.static_range(K):
        _, index = _first_largest(ranked)
        is_chosen = e[None, :] == index[:, None]
        tl.store(experts_TK + t * K + k, index.to(tl.int64), t < tokens)
        weight_T = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
        weights = tl.where((k_K == k)[None, :], weight_T[:, None], weights)
        chosen += is_chosen.to(tl.int32)
        ranked = tl.where(is_chosen, float("-inf"), ranked)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 1) + LITTLE)[:, None]
    tl.store(weights_TK + t[:, None] * K + k_K[None, :], weights * scale, (t < tokens)[:, None] & (k_K < K)[None, :])
    loads = tl.sum(tl.where(inside, chosen, 0), 0)
    tl.store(loads_NE + tl.program_id(0).to(tl.int64) * experts + e, loads, e < experts)
    shares = scores / (tl.sum(scores, 1) + LITTLE)[:, None]
    terms = tl.where(inside, shares * tl.log(tl.where(shares == 0.0, 1.0, shares)), 0.0)
    tl.store(entropies_N + tl.program_id(0), -tl.sum(tl.sum(terms, 1), 0))


@triton.jit
def _total(
    loads_NE: tl.tensor, entropies_N: tl.tensor, loads_E: tl.tensor, entropy: tl.tensor, tiles: int, experts: int,
    TILES: tl.constexpr, TOGETHER: tl.constexpr,
) -> None:  # fmt: skip
    """Store the loads of some experts; the first program also stores the entropy. Grid: tiles of experts."""
    e = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    loads = tl.zeros((TOGETHER,), tl.int64)
    total = tl.zeros((TILES,), tl.float64)
    for first in range(0, tiles, TILES):
        n = (first + tl.arange(0, TILES)).to(tl.int64)
        inside = (n < tiles)[:, None] & (e < experts)[None, :]
        loads += tl.sum(tl.load(loads_NE + n[:, None] * experts + e[None, :], inside, 0), 0)
        total += tl.load(entropies_N + n, n < tiles, 0.0)
    tl.store(loads_E + e, loads, e < experts)
    if tl.program_id(0) == 0:
        tl.store(entropy, tl.sum(total, 0))


@triton.jit
def _logit_gradients(
    scores_TE: tl.tensor, experts_TK: tl.tensor, grad_weights_TK: tl.tensor, grad_scores_TE: tl.tensor,
    grad_logits_TE: tl.tensor, tokens: int, experts: int, scale: float, K: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of a tile's logits; those of weights or scores may be None. Grid: tiles of tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    inside = (t < tokens)[:, None] & (e < experts)[None, :]
    at = t[:, None] * experts + e[None, :]
    scores = tl.load(scores_TE + at, inside, 0.0)
    if grad_scores_TE is None:
        grad_scores = tl.zeros((TOKENS, EXPERTS), tl.float32)
    else:
        grad_scores = tl.load(grad_scores_TE + at, inside, 0.0)
    if grad_weights_TK is not None:
        sum_T = tl.zeros((TOKENS,), tl.float32)
        product_T = tl.zeros((TOKENS,), tl.float32)
        grad_chosen = tl.zeros((TOKENS, EXPERTS), tl.float32)
        chosen = tl.zeros((TOKENS, EXPERTS), tl.float32)
        for k in tl.static_range(K):
            index = tl.load(experts_TK + t * K + k, t < tokens, 0)
            grad_weight_T = tl.load(grad_weights_TK + t * K + k, t < tokens, 0.0) * scale
            is_chosen = e[None, :] == index[:, None]
            score_T = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
            sum_T += score_T
            product_T += grad_weight_T * score_T
            grad_chosen = tl.where(is_chosen, grad_weight_T[:, None], grad_chosen)
            chosen = tl.where(is_chosen, 1.0, chosen)
        if NORMALISE:
            sum_T += LITTLE
            grad_chosen = (grad_chosen - chosen * (product_T / sum_T)[:, None]) / sum_T[:, None]
        grad_scores += grad_chosen
    if SOFTMAX:
        grad_logits = scores * (grad_scores - tl.sum(scores * grad_scores, 1)[:, None])
    else:
        grad_logits = grad_scores * scores * (1.0 - scores)
    tl.store(grad_logits_TE + at, grad_logits, inside)
