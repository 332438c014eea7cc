"""Planted bugs in mixtures of experts, to test whether the audit finds the wrong gradients, loads and corrections.

`Bug` is explained in `layer_bugs.py`. EXPERT_BUGS describes each bug's effect.

Letters in names of tensors: T tokens, K experts per token, D channels in the residual stream, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from hybridtron.engine.routers import move_corrections
from hybridtron.mixers.base import Routed
from hybridtron.mixers.moe import MoE
from hybridtron.ops.experts import ExpertsInputs, RouteInputs, Routing, experts, loads_of, route
from hybridtron.ops.precision import at_least_fp32
from hybridtron.proving.audit.expert_parallel_bugs import EXPERT_PARALLEL_BUGS
from hybridtron.proving.audit.layer_bugs import Bug, Replaced, marked

MIXER = "hybridtron.mixers.moe"
_losses = MoE._losses
COUNTER = "counter_E"


def _gradient_summed_twice(x: Tensor) -> Tensor:
    """Return the input in fp32; the gradient of a weight, the router, is also summed over ranks here."""
    wide = at_least_fp32(x)
    if isinstance(x, nn.Parameter):
        return copy_to_tensor_model_parallel_region(wide)
    return wide


def _with_full_gradient(self: MoE, *inputs: Any) -> dict[str, Tensor]:
    ranks = self.ranks
    self.ranks = 1
    try:
        return _losses(self, *inputs)
    finally:
        self.ranks = ranks


def _weighted_behind_the_sum(inputs: ExpertsInputs) -> Tensor:
    routing = inputs.routing
    y_TD = torch.zeros_like(inputs.x_TD)
    for place in range(routing.experts_TK.shape[1]):
        ones_T1 = torch.ones_like(routing.weights_TK[:, :1])
        chosen_T1 = routing.experts_TK[:, place : place + 1].contiguous()
        loads_E = loads_of(chosen_T1, len(routing.loads_E))
        alone = routing._replace(experts_TK=chosen_T1, weights_TK=ones_T1, loads_E=loads_E)
        partial_TD = experts(inputs._replace(routing=alone))
        summed_TD = reduce_from_tensor_model_parallel_region(partial_TD.clone())
        y_TD = y_TD + routing.weights_TK[:, place, None] * summed_TD
    return y_TD


def _counted_at_every_pass(inputs: RouteInputs) -> Routing:
    """Route tokens, and add the loads to a counter of the module, which has the options."""
    routing = route(inputs)
    before_E = getattr(inputs.options, COUNTER, torch.zeros_like(routing.loads_E))
    object.__setattr__(inputs.options, COUNTER, before_E + routing.loads_E)
    return routing


def _moved_by_counters(models: Any, choices: Mapping[int, Routed]) -> None:
    """Move corrections by the modules' counters, which replace the step's loads in place."""
    for model in models:
        for name, layer in model.layers.items():
            if isinstance(layer.mixer, MoE):
                choices[int(name)].loads_E.copy_(getattr(layer.mixer.options, COUNTER))
    move_corrections(models, choices)


def _not_reduced(choices: Mapping[int, Routed], groups: Any) -> dict[int, Routed]:
    return {index: routed._replace(loads_E=routed.loads_E.clone()) for index, routed in choices.items()}


def _dropped_beyond(routing: Routing) -> Routing:
    """Return the routing without the tokens beyond the mean load of an expert."""
    count = len(routing.loads_E)
    most = -(-routing.experts_TK.numel() // count)
    chosen_TKE = nn.functional.one_hot(routing.experts_TK, count)
    order_TK = (chosen_TKE.flatten(0, 1).cumsum(0).view_as(chosen_TKE) * chosen_TKE).sum(-1)
    return routing._replace(weights_TK=routing.weights_TK * (order_TK <= most))


def _dropping(inputs: ExpertsInputs) -> Tensor:
    return experts(inputs._replace(routing=_dropped_beyond(inputs.routing)))


ROUTER_GRADIENT = marked("mixer.router", "partial_over_tensor", False)
ROUTER_TWICE: Replaced = {f"{MIXER}.at_least_fp32": _gradient_summed_twice}
AUXILIARY_WHOLE: Replaced = {f"{MIXER}.MoE._losses": _with_full_gradient}
WEIGHTED_BEHIND: Replaced = {
    f"{MIXER}.experts": _weighted_behind_the_sum,
    f"{MIXER}.sum_output": lambda y_LBD, tensor: y_LBD,
}
COUNTED_TWICE: Replaced = {
    f"{MIXER}.route": _counted_at_every_pass,
    "hybridtron.engine.engine.move_corrections": _moved_by_counters,
}
LOADS_OF_RANK: Replaced = {"hybridtron.engine.schedule.reduce_choices": _not_reduced}
LOADS_LOST: Replaced = {
    "hybridtron.engine.schedule.add_choices": lambda sums, new: None,
}
BALANCE_OF_SHARD: Replaced = {f"{MIXER}.all_reduce_shards": lambda x, shard: x * shard.size}
DROPPED: Replaced = {f"{MIXER}.experts": _dropping}

EXPERT_BUGS = {
    "router_gradient": Bug("gradients of the router are not summed over ranks", ROUTER_GRADIENT, "experts", "tp2"),
    "latent_gradient": Bug(
        "gradients of the projection to the experts' latent width are not summed over ranks",
        marked("mixer.latent_in", "partial_over_tensor", False),
        "experts",
        "tp2",
    ),
    "router_twice": Bug("gradients of the router are summed over ranks twice", ROUTER_TWICE, "experts", "tp2"),
    "auxiliary_whole": Bug(
        "each rank adds the full gradient of a router's auxiliary loss", AUXILIARY_WHOLE, "experts", "tp2-sp"
    ),
    "weighted_behind": Bug(
        "expert outputs are weighted after the sum over ranks, not before", WEIGHTED_BEHIND, "experts", "tp2"
    ),
    "counted_twice": Bug(
        "a router's loads are counted again when its layer is recomputed", COUNTED_TWICE, "experts", "tp2-sp"
    ),
    "loads_of_rank": Bug("corrections move by the loads of a rank's own tokens", LOADS_OF_RANK, "experts", "dp2"),
    "loads_lost": Bug("a router's loads are not added up", LOADS_LOST, "experts", "pp2"),
    "balance_of_shard": Bug(
        "the balance loss counts only the tokens of a rank's shard of a row", BALANCE_OF_SHARD, "experts", "cp2"
    ),
    "dropped": Bug("tokens beyond an expert's mean load are dropped in silence", DROPPED, "experts", "dp2"),
    **EXPERT_PARALLEL_BUGS,
}
