"""The two calls of a mixer with experts: `route`, then `experts_mlp` (equations: `reference.py`).

Legend: T tokens, E experts, K experts per token, D width, H hidden channels of an expert, F rows of `gate_up`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Op, untraced
from hybridtron.ops.experts import ordered, reference
from hybridtron.ops.experts.parts import expert_choice
from hybridtron.ops.experts.reference import TINY, ChoiceInputs, ExpertActivation, ExpertsInputs, Router, Routing
from hybridtron.ops.precision import at_least_fp32

experts = Op(reference.experts, (ordered.ORDERED,))


def route(logits_TE: Tensor, correction_E: Tensor | None, options: Router) -> Routing:
    """Choose each token's experts and their weights; the correction changes the choice alone."""
    logits_TE = at_least_fp32(logits_TE)
    if options.scores == "softmax":
        scores_TE = logits_TE.softmax(-1)
    else:
        scores_TE = logits_TE.sigmoid()
    experts_TK = expert_choice(ChoiceInputs(scores_TE, correction_E, options))
    weights_TK = _chosen_weights(scores_TE, experts_TK, options)
    return Routing(experts_TK, weights_TK, loads_of(experts_TK, logits_TE.shape[1]), scores_TE)


@untraced
def _chosen_weights(scores_TE: Tensor, experts_TK: Tensor, options: Router) -> Tensor:
    return _ChosenWeights.apply(scores_TE, experts_TK, options)


class _ChosenWeights(torch.autograd.Function):
    """Autograd function of the weights, with p_k = s_k / (s_1 + ... + s_K) if they are normalised.

        grad s_k = scale (grad w_k - sum over j of grad w_j p_j) / (s_1 + ... + s_K)

    A token's experts differ, so its gradients are stored to zeros: autograd would add them there, by atomics on a GPU.
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


def loads_of(experts_TK: Tensor, experts: int) -> Tensor:
    """Return the number of choices of each expert, in int64, without a wait for the device."""
    chosen_N = experts_TK.flatten()
    return chosen_N.new_zeros(experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))


def experts_mlp(
    x_TD: Tensor, routing: Routing, gate_up_EFD: Tensor, down_EDH: Tensor, activation: ExpertActivation
) -> Tensor:
    """Return each token's sum of weighted expert outputs (T, D), in the dtype of x."""
    return experts(ExpertsInputs(x_TD, routing, gate_up_EFD, down_EDH, activation))
