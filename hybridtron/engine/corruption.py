"""Checks for silent corruption: digests of optimizer states, weights and gradients, whose bits must be equal.

    state       a rank's moments, moving averages and fp32 masters, and the weights that it rounds from its masters:
                before an update they must equal those after the last update
    weights     a shard of the weights must be equal on all ranks that hold copies of the shard
    gradients   all data-parallel ranks compute the same micro-batch, and must get equal gradients

A tensor's digest is the sum of its words, read as integers, modulo 2^32 (2^16 for bf16, 2^64 for fp64). A change within
a single word always changes the sum, so each flipped bit is seen for certain. Changes of several words are seen unless
their differences cancel, which for random changes has the probability 2^-32 (2^-16 for bf16). A digest reads a tensor
once, and allocates nothing of its size.

No check makes the host wait: a rank's differences are counted on the device, and `Engine.step` adds the counts to the
reduction of the gradient norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.engine.optimizer import AVERAGE, Optimizer
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mesh import RankGroup

STATE = "state"
WEIGHTS = "weights"
GRADIENTS = "gradients"
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers with as many bytes


def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' digests: int64, on the tensors' device."""
    sums = []
    for tensor in tensors:
        words = tensor.detach().view(WORDS[tensor.element_size()])
        sums.append(words.sum(dtype=words.dtype))  # a wider type would make torch copy the words
    if not sums:
        return torch.zeros(0, dtype=torch.int64, device=compute_device())
    return torch.cat([total.reshape(1) for total in sums]).long()


def equal_on_all(digests: Tensor, ranks: RankGroup) -> Tensor:
    """Return a bool for each digest: True if it is equal on all these ranks. All of them call this together."""
    extremes = torch.cat([digests, -digests])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=ranks.group)
    largest, smallest = extremes.chunk(2)
    return largest == -smallest


@dataclass(frozen=True)
class Comparison:
    """Digests of this rank's tensors, each with a bool: True if it differs from the digest that it must equal.

    keys: a key for each tensor; ranks whose tensors must be equal give them the same key
    """

    keys: Sequence[str]
    digests: Tensor
    differ: Tensor

    def report(self) -> dict[str, int]:
        """Return the digests that differ, by key. The host waits for the device."""
        pairs = zip(self.keys, self.digests.tolist(), self.differ.tolist(), strict=True)
        return {key: digest for key, digest, differs in pairs if differs}


class CorruptionChecks:
    """Comparisons of a step, on one rank.

    watches_state: whether the optimizer's state is compared in each step
    counts: kind of comparison -> number of ranks with a difference in the last step
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, Any], groups: Groups) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.groups = groups
        self.watches_state = False
        self.weights_due = False  # True if the step must compare weights
        self.counts: dict[str, int] = {}
        self._made: dict[str, Comparison] = {}  # comparisons of the step by kind

    def report(self, kind: str) -> dict[str, int]:
        """Return the digests that differ on this rank in the last step, by key."""
        return self._made[kind].report()

    def begin(self) -> None:
        """Start a step."""
        self.weights_due = False
        self.counts = {}
        self._made = {}

    def flags(self) -> list[Tensor]:
        """Compare state and weights before an update; return a tensor (1,) for each: 1 if a digest differs."""
        if self.watches_state and self.optimizer.digests is not None:
            self._made[STATE] = self._compare_state(self.optimizer.digests)
        if self.weights_due:
            self._made[WEIGHTS] = self._compare_weights()
        return [made.differ.any().float().reshape(1) for made in self._made.values()]

    def take_counts(self, sums: Sequence[float]) -> None:
        """Store the sums of all ranks' flags in `counts`."""
        self.counts = {kind: int(count) for kind, count in zip(self._made, sums, strict=True)}

    def after_update(self, accepted: bool) -> None:
        """Compute the digests of the state for the comparison in the next step."""
        if self.watches_state and (accepted or self.optimizer.digests is None):
            self.optimizer.digests = digests_of([tensor for _, tensor in self._state()])

    @torch.no_grad()
    def compare_gradients(self) -> None:
        """Compare the accumulated gradients, before they are reduced, over the data-parallel ranks."""
        learning = {name: weight.main_grad for name, weight in self.weights.items() if weight.requires_grad}
        digests = digests_of(list(learning.values()))
        keys = [key_of(name, self.groups.data) for name in learning]
        self._made[GRADIENTS] = Comparison(keys, digests, ~equal_on_all(digests, self.groups.data))

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (key, tensor) for this rank's masters, averages and moments, and for its elements of bf16 weights."""
        for name, shard in self.optimizer.shards.items():
            kinds = ("master", AVERAGE, *self.optimizer.rule.parts(name, self.optimizer.table[name]))
            for kind in kinds:
                if (tensor := shard.tensor(kind)) is not None:
                    yield f"{kind} of {name}", tensor
            if shard.master is not None and shard.master.dtype != shard.weight.dtype:
                yield f"weight {name}", shard.weight.detach().view(-1)[shard.start : shard.stop]

    def _compare_state(self, before: Tensor) -> Comparison:
        state = list(self._state())
        digests = digests_of([tensor for _, tensor in state])
        return Comparison([key for key, _ in state], digests, digests != before)

    def _compare_weights(self) -> Comparison:
        """Compare weights family by family, because copies of another family may be on other ranks."""
        keys = []
        digests = []
        differ = []
        for family, mesh in self.groups.meshes.items():
            names = [name for name in self.weights if self.optimizer.table[name].family == family]
            if not names:
                continue
            of_family = digests_of([self.weights[name] for name in names])
            keys += [key_of(name, mesh.copies) for name in names]
            digests.append(of_family)
            differ.append(~equal_on_all(of_family, mesh.copies))
        return Comparison(keys, torch.cat(digests), torch.cat(differ))


def key_of(name: str, ranks: RankGroup) -> str:
    """Return a key for these ranks' shard of a weight. Other ranks may hold another shard of the same weight."""
    first = dist.get_process_group_ranks(ranks.group)[0]
    return f"{name} of ranks {first}"
