"""Sums the experts' loads over a training step, and moves the routers' corrections, which keep the loads even.

A router sends each token to a few of its experts, and an expert's load is the number of tokens that it got. A forward
pass returns the loads (`mixers/base.py:Routed`). They are added over micro-batches, and once a step over the ranks that
hold other tokens and over pipeline ranks. Tensor-parallel ranks route the same tokens and count the same loads, unless
each has full experts (`parallel.expert_tensor=1`) and routes its own tokens. Loads are integers: no order of addition
changes them.

With `balance: bias`, a correction is added to an expert's scores for the choice of experts. After an accepted step,

    correction_e <- correction_e + speed * sign(sum(load) - E * load_e)

for a router with E experts. sum(load) / E is the mean load, and the sign is computed from integers, so it is exact.

Legend: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.mixers.base import Routed
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import Groups


def routers_of(arch: Architecture) -> dict[int, MoESpec]:
    """Return the specs of the model's sub-layers with experts, by the sub-layer's index."""
    return {index: spec for index, spec in enumerate(arch.specs) if isinstance(spec, MoESpec)}


def auxiliary_names(phase: ResolvedPhase) -> list[str]:
    """Return the sorted names of the mixers' auxiliary losses in a phase. A frozen router has no losses."""
    names: set[str] = set()
    for index, spec in enumerate(phase.arch.specs):
        if not isinstance(spec, MoESpec) or phase.learns(f"layers.{index}.mixer.router"):
            names.update(spec.auxiliary)
    return sorted(names)


def no_choices(routers: Mapping[int, MoESpec], device: torch.device) -> dict[int, Routed]:
    """Return counts of zero for every router in the model."""
    if not routers:
        return {}
    sizes = [spec.experts + 1 for spec in routers.values()]
    counts = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    entropies = torch.zeros(len(sizes), dtype=torch.float64, device=device)
    return _by_index(routers, counts, entropies, sizes)


def add_choices(sums: Mapping[int, Routed], new: Mapping[int, Routed]) -> None:
    """Add a forward pass's counts to `sums` in place; `new` has only the layers of one pipeline stage.

    On a GPU this takes few launches: each adds the loads, the entropies or the dropped choices of many layers.
    """
    if not new:
        return
    for kind in range(len(Routed._fields)):
        torch._foreach_add_([sums[index][kind] for index in new], [routed[kind] for routed in new.values()])


def reduce_choices(sums: Mapping[int, Routed], groups: Groups) -> dict[int, Routed]:
    """Return the counts of all tokens in a step, on every rank. All ranks must call this function together."""
    if not sums:
        return {}
    counts = torch.cat([value.reshape(-1) for routed in sums.values() for value in (routed.loads_E, routed.dropped)])
    entropies = torch.stack([routed.entropy for routed in sums.values()])
    with_other_tokens = [groups.pipeline, groups.dense.copies]
    if groups.tensor.routes_own_tokens:
        with_other_tokens.append(groups.tensor)
    for ranks in with_other_tokens:
        dist.all_reduce(counts, group=ranks.group)
        dist.all_reduce(entropies, group=ranks.group)
    return _by_index(sums, counts, entropies, [len(routed.loads_E) + 1 for routed in sums.values()])


def _by_index(indices: Iterable[int], counts: Tensor, entropies: Tensor, sizes: Sequence[int]) -> dict[int, Routed]:
    """Return each router's part of flat tensors; in `counts`, a router's dropped choices follow its loads."""
    parts = counts.split(list(sizes))
    return {
        index: Routed(part[:-1], entropy, part[-1])
        for index, part, entropy in zip(indices, parts, entropies.unbind(), strict=True)
    }


@torch.no_grad()
def move_corrections(models: Sequence[LanguageModel], choices: Mapping[int, Routed]) -> None:
    """Move the routers' corrections in these stages by an accepted step's loads.

    A frozen router keeps its correction.
    """
    for model in models:
        for name, layer in model.layers.items():
            spec = model.arch.specs[int(name)]
            if isinstance(spec, MoESpec) and spec.corrected and layer.get_parameter("mixer.router").requires_grad:
                loads_E = choices[int(name)].loads_E
                direction_E = (loads_E.sum() - spec.experts * loads_E).sign()
                correction_E = layer.get_parameter("mixer.correction")
                correction_E.add_(direction_E.to(correction_E.dtype), alpha=spec.speed)


class RouterMetrics(NamedTuple):
    """Metrics of one router in one step.

    load_max_over_mean: the largest load, divided by the mean load; 1 if loads are even
    idle: number of experts without a token
    entropy: mean over tokens of the entropy of the router's scores, divided by its maximum, log(E)
    dropped: fraction of choices beyond the experts' capacity
    rank_max_over_mean: the largest load of a rank, divided by the mean load of ranks; 1 if no ranks divide the experts
    """

    load_max_over_mean: float
    idle: int
    entropy: float
    dropped: float
    rank_max_over_mean: float


@dataclass(frozen=True)
class ChoiceValues:
    """The counts of all routers as one flat tensor, so that the host reads them together with other values.

    choices: the counts, by the sub-layer's index
    top_k: number of experts per token, by the sub-layer's index
    ranks: number of ranks that divide the experts
    """

    choices: Mapping[int, Routed]
    top_k: Mapping[int, int]
    ranks: int = 1

    @property
    def flat(self) -> list[Tensor]:
        """Loads, entropy and dropped choices of each router, in float64."""
        return [value.double().reshape(-1) for routed in self.choices.values() for value in routed]

    def metrics(self, values: Sequence[float]) -> dict[str, RouterMetrics]:
        """Return layer (`layers.3`) -> its router's metrics. `values` are the numbers in `flat`, read by the host."""
        metrics = {}
        at = 0
        for index, routed in self.choices.items():
            experts = len(routed.loads_E)
            loads = values[at : at + experts]
            entropy = values[at + experts]
            dropped = values[at + experts + 1]
            at += experts + 2
            total = sum(loads)
            tokens = total / self.top_k[index]
            if total:
                share = entropy / tokens / math.log(max(2, experts))
                largest = max(loads) * experts / total
                size = experts // self.ranks
                of_ranks = [sum(loads[first : first + size]) for first in range(0, experts, size)]
                uneven = max(of_ranks) * self.ranks / total
                metrics[f"layers.{index}"] = RouterMetrics(largest, loads.count(0), share, dropped / total, uneven)
        return metrics
