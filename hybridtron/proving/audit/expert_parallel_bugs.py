"""Planted bugs in expert parallelism, to test whether the audit finds the wrong gradients, norms and corrections.

`Bug` is explained in `layer_bugs.py`. EXPERT_PARALLEL_BUGS describes each bug's effect.

Letters in names of tensors: N rows, R ranks, E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridtron.engine.routers import reduce_choices
from hybridtron.mixers.base import Routed
from hybridtron.mixers.moe import MoE
from hybridtron.ops.experts import ExpertOrder, RowMLPInputs, mlp_of_rows
from hybridtron.parallel.experts import RowCounts, exchange, order_of_received
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


def _one_way(rows_ND: Tensor, rows: RowCounts) -> Tensor:
    sent_ND = exchange(rows_ND, rows)
    return sent_ND.detach() + rows_ND.sum() * 0


DENSE_GROUP = marked("mixer.gate_up", "allreduce", True)
UNMARKED = marked("mixer.gate_up", "tensor_model_parallel", False)
LOADS_OF_OWN_TOKENS: Replaced = {"hybridtron.engine.schedule.reduce_choices": _of_own_tokens}
AUXILIARY_BY_RANK: Replaced = {"hybridtron.mixers.moe.MoE._losses": _once_a_rank}
BEYOND_THE_MEAN: Replaced = {f"{RANKS}.mlp_of_rows": _beyond_the_mean}
UNSORTED: Replaced = {f"{RANKS}.order_of_received": _in_order_of_ranks}
ONE_WAY: Replaced = {f"{RANKS}.exchange": _one_way}

EXPERT_PARALLEL_BUGS = {
    "expert_dense_group": Bug(
        "gradients of experts are summed over ranks that have other experts", DENSE_GROUP, "experts", "dp2-ep2"
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
    "unsorted": Bug("an owner computes received rows in the order of ranks", UNSORTED, "experts", "dp4-ep2"),
    "one_way": Bug("gradients of exchanged rows are not sent back", ONE_WAY, "experts", "pp2-dp2-ep2"),
}
