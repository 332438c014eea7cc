"""The two calls of a mixer with experts: `route`, then `experts_mlp` (equations: `reference.py`).

Legend: T tokens, E experts, K experts per token, D width, H hidden channels of an expert, F rows of `gate_up`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Op
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
    weights_TK = scores_TE.gather(1, experts_TK)
    if options.normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
    if options.scale != 1.0:
        weights_TK = weights_TK * options.scale
    return Routing(experts_TK, weights_TK, loads_of(experts_TK, logits_TE.shape[1]), scores_TE)


def loads_of(experts_TK: Tensor, experts: int) -> Tensor:
    """Return the number of choices of each expert, in int64, without a wait for the device."""
    chosen_N = experts_TK.flatten()
    return chosen_N.new_zeros(experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))


def experts_mlp(
    x_TD: Tensor, routing: Routing, gate_up_EFD: Tensor, down_EDH: Tensor, activation: ExpertActivation
) -> Tensor:
    """Return each token's sum of weighted expert outputs (T, D), in the dtype of x."""
    return experts(ExpertsInputs(x_TD, routing, gate_up_EFD, down_EDH, activation))
