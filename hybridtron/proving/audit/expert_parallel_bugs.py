"""Planted bugs in expert parallelism, to test whether the audit finds the wrong gradients, norms and corrections.

`Bug` is explained in `layer_bugs.py`. EXPERT_PARALLEL_BUGS describes each bug's effect.

Letters in names of tensors: N rows, R ranks, E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from hybridtron.architecture.base import EXPERTS
from hybridtron.config.schema import Config
from hybridtron.engine.routers import reduce_choices
from hybridtron.engine.stage import Stage, data_parallel
from hybridtron.mixers.base import Routed
from hybridtron.mixers.moe import MoE, routed
from hybridtron.ops.experts import ExpertOrder, ExpertsInputs, RowMLPInputs, mlp_of_rows, slot_order
from hybridtron.parallel.experts import ExpertRanks, Flight, SentRows, arrive, order_of_received, outputs_of_owners
from hybridtron.parallel.groups import Groups
from hybridtron.proving.audit.layer_bugs import Bug, Replaced, marked

RANKS = "hybridtron.parallel.experts"
_losses = MoE._losses


def _once_a_rank(self: MoE, *inputs: Any) -> dict[str, Tensor]:
    size = self.expert_ranks.expert.size
    return {name: loss * size for name, loss in _losses(self, *inputs).items()}


def _of_own_tokens(choices: Mapping[int, Routed], groups: Any) -> dict[int, Routed]:
    tensor = replace(groups.tensor, sequence=False)
    return reduce_choices(choices, replace(groups, tensor=tensor))


def _beyond_the_mean(inputs: RowMLPInputs) -> Tensor:
    """Compute the first rows of each expert, up to the mean load of this rank's experts; set other rows to zero."""
    starts_E = torch.nn.functional.pad(inputs.ends_E, (1, -1))
    most = -(-len(inputs.rows_ND) // len(starts_E))
    number_N = torch.arange(len(inputs.rows_ND), device=starts_E.device)
    expert_N = torch.searchsorted(inputs.ends_E, number_N, right=True)
    kept_N = number_N - starts_E[expert_N] < most
    return mlp_of_rows(inputs) * kept_N[:, None]


def _in_order_of_ranks(received_RE: Tensor, count: int) -> ExpertOrder:
    order = order_of_received(received_RE, count)
    same_N = torch.arange(count, device=received_RE.device)
    return ExpertOrder(same_N, same_N[:, None], order.ends_E)


def _one_way(pending_ND: Tensor, flight: Flight) -> Tensor:
    """Send back gradients of zero."""
    received_ND = arrive(pending_ND, flight)
    return received_ND.detach() + 0 * (received_ND - received_ND.detach())


def _averaged_over_copies(
    stages: Sequence[Stage], config: Config, groups: Groups, dtype: torch.dtype
) -> list[DistributedDataParallel]:
    wrapped = data_parallel(stages, config, groups, dtype)
    for buckets in (buckets for stage in wrapped for buckets in stage.expert_parallel_bucket_groups):
        for bucket in buckets.buckets:
            bucket.gradient_scaling_factor = 1 / groups.meshes[EXPERTS].copies.size
    return wrapped


def _counted_by_both(inputs: ExpertsInputs, ranks: ExpertRanks, sent: SentRows | None) -> Tensor:
    """Give the experts' weights the gradients of two tensor-parallel ranks that route the same tokens."""
    gate_up_EFD = 2 * inputs.gate_up_EFD - inputs.gate_up_EFD.detach()
    down_EDH = 2 * inputs.down_EDH - inputs.down_EDH.detach()
    return outputs_of_owners(inputs._replace(gate_up_EFD=gate_up_EFD, down_EDH=down_EDH), ranks, sent)


DENSE_GROUP = marked("mixer.gate_up", "allreduce", True)
UNMARKED = marked("mixer.gate_up", "tensor_model_parallel", False)
LOADS_OF_OWN_TOKENS: Replaced = {"hybridtron.engine.schedule.reduce_choices": _of_own_tokens}
AUXILIARY_BY_RANK: Replaced = {"hybridtron.mixers.moe.MoE._losses": _once_a_rank}
BEYOND_THE_MEAN: Replaced = {f"{RANKS}.mlp_of_rows": _beyond_the_mean}
UNSORTED: Replaced = {f"{RANKS}.order_of_received": _in_order_of_ranks}


def _to_another_slot(experts_TK: Tensor, ranks_TK: Tensor, kept_TK: Tensor, sizes: tuple[int, int, int]) -> ExpertOrder:
    """Return the order in which dropped choices are in the last slot, in the place of its own choice."""
    order = slot_order(experts_TK, ranks_TK, kept_TK, sizes)
    return order._replace(place_TK=order.place_TK.clamp(max=len(order.source_N) - 2))


AVERAGED: Replaced = {"hybridtron.engine.engine.data_parallel": _averaged_over_copies}
CAPACITY_OF_PART: Replaced = {"hybridtron.mixers.moe.RowParts.before": lambda self, x: torch.zeros_like(x)}
DROPPED_UNCOUNTED: Replaced = {"hybridtron.mixers.moe.routed": lambda routing, kept: routed(routing, None)}
ANOTHER_SLOT: Replaced = {"hybridtron.mixers.moe.slot_order": _to_another_slot}
DOUBLED: Replaced = {"hybridtron.mixers.moe.outputs_of_owners": _counted_by_both}
ONE_WAY: Replaced = {f"{RANKS}.arrive": _one_way}

EXPERT_PARALLEL_BUGS = {
    "expert_dense_group": Bug(
        "gradients of experts are summed over ranks that have other experts", DENSE_GROUP, "experts", "dp2-ep2"
    ),
    "expert_averaged": Bug(
        "gradients of experts are averaged over ranks with the same experts, not summed", AVERAGED, "experts", "dp4-ep2"
    ),
    "expert_doubled": Bug(
        "full experts get the gradient of each token from every tensor-parallel rank", DOUBLED, "experts", "tp2-ep2-et1"
    ),
    "expert_unmarked": Bug(
        "the gradient norm counts experts on one tensor-parallel rank only", UNMARKED, "experts", "tp2-ep2-et1"
    ),
    "loads_of_own_tokens": Bug(
        "each tensor-parallel rank moves corrections by the loads of its own tokens",
        LOADS_OF_OWN_TOKENS,
        "experts",
        "tp2-ep2-et1",
    ),
    "auxiliary_by_rank": Bug(
        "a router's auxiliary loss counts once for each rank that divides the experts",
        AUXILIARY_BY_RANK,
        "experts",
        "cp2-ep2",
    ),
    "dropped_by_owner": Bug(
        "an owner drops the rows beyond the mean load of its experts", BEYOND_THE_MEAN, "experts", "dp4-ep4"
    ),
    "capacity_of_part": Bug(
        "a row's capacity counts the choices of a rank's own tokens only", CAPACITY_OF_PART, "capacity", "cp2-ep2"
    ),
    "dropped_uncounted": Bug(
        "choices beyond the capacity are dropped without being counted", DROPPED_UNCOUNTED, "capacity", "tp2-ep2-et1"
    ),
    "another_slot": Bug(
        "dropped choices are sent in the place of the choice in the last slot", ANOTHER_SLOT, "capacity", "dp2-ep2"
    ),
    "unsorted": Bug("an owner computes received rows in the order of ranks", UNSORTED, "experts", "dp4-ep2"),
    "one_way": Bug("gradients of exchanged rows are not sent back", ONE_WAY, "experts", "pp2-dp2-ep2"),
}
