"""Routing: each token's experts and their weights, from the router's logits (equations: `reference.py`).

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import untraced
from hybridtron.ops.experts.parts import expert_choice
from hybridtron.ops.experts.reference import TINY, ChoiceInputs, Router, Routing
from hybridtron.ops.precision import at_least_fp32


class RouteInputs(NamedTuple):
    """The router's logits, a correction that changes only the choice of experts, and the router's options."""

    logits_TE: Tensor
    correction_E: Tensor | None
    options: Router


def route(inputs: RouteInputs) -> Routing:
    """Choose each token's experts and their weights."""
    logits_TE = at_least_fp32(inputs.logits_TE)
    if inputs.options.scores == "softmax":
        scores_TE = logits_TE.softmax(-1)
    else:
        scores_TE = logits_TE.sigmoid()
    experts_TK = expert_choice(ChoiceInputs(scores_TE, inputs.correction_E, inputs.options))
    weights_TK = _chosen_weights(scores_TE, experts_TK, inputs.options)
    loads_E = loads_of(experts_TK, logits_TE.shape[1])
    return Routing(experts_TK, weights_TK, loads_E, scores_TE, entropy_of(scores_TE))


@torch.no_grad()
def entropy_of(scores_TE: Tensor) -> Tensor:
    """Return the sum over tokens of the entropy of their scores, in float64 and nats."""
    shares_TE = shares(scores_TE)
    return -torch.xlogy(shares_TE, shares_TE).sum(dtype=torch.float64)


def shares(scores_TE: Tensor) -> Tensor:
    """Return the scores divided by their sum over experts, which is 1 for softmax already."""
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)


def loads_of(experts_TK: Tensor, experts: int) -> Tensor:
    """Return how many choices each expert has, in int64, without waiting for the device."""
    chosen_N = experts_TK.flatten()
    return chosen_N.new_zeros(experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))


@untraced
def _chosen_weights(scores_TE: Tensor, experts_TK: Tensor, options: Router) -> Tensor:
    return _ChosenWeights.apply(scores_TE, experts_TK, options)


class _ChosenWeights(torch.autograd.Function):
    """Autograd function of the weights, with p_k = s_k / (s_1 + ... + s_K) if they are normalised.

        grad s_k = scale (grad w_k - sum over j of grad w_j p_j) / (s_1 + ... + s_K)

    A token's experts differ, so its gradients are stored into zeros. Autograd would add them, on a GPU by atomics.
    """

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, experts_TK: Tensor, options: Router) -> Tensor:
        ctx.options = options
        ctx.experts = scores_TE.shape[1]
        weights_TK = scores_TE.gather(1, experts_TK)
        if options.normalise:
            sum_T1 = weights_TK.sum(-1, keepdim=True).add_(TINY)
            weights_TK.div_(sum_T1)
            ctx.save_for_backward(experts_TK, weights_TK, sum_T1)
        else:
            ctx.save_for_backward(experts_TK)
        return weights_TK * options.scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        experts_TK, *normalised = ctx.saved_tensors
        grad_TK = grads[0] * ctx.options.scale
        if normalised:
            shares_TK, sum_T1 = normalised
            grad_TK = grad_TK.sub_((grad_TK * shares_TK).sum(-1, keepdim=True)).div_(sum_T1)
        return grad_TK.new_zeros(len(grad_TK), ctx.experts).scatter_(1, experts_TK, grad_TK), None, None
