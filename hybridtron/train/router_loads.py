"""Warns when the loads of a layer's experts grow uneven, and says how much memory the busiest rank needs.

A layer is reported again only after it has become clearly worse, so a run has few such lines. metrics.jsonl has the
numbers of every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hybridtron.architecture.moe import MoESpec
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Documents
from hybridtron.device import free_memory_gib
from hybridtron.planning.activations import even_rows_gib, uses_slots
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics

LOG = logging.getLogger(__name__)
LOAD = 3.0  # times the mean load, from which an expert's load is reported
RANK = 1.5  # times the mean load, from which a rank's load is reported
ENTROPY = 0.5  # of the maximum, from which a low entropy is reported
WORSE = 2.0  # times the last reported value, from which a layer is reported again
WORSE_RANK = 1.25


@dataclass
class Reported:
    """The worst values of a layer that were reported so far."""

    load: float = 0.0
    idle: float = 0.0
    entropy: float = 1.0
    rank: float = 1.0

    def grown(self, router: Mapping[str, float], rank: float) -> bool:
        """Return True if the layer has become clearly worse, and remember its values then.

        rank: the largest number of rows that a rank computes, divided by the mean
        """
        load = router["load_max_over_mean"]
        idle = router["idle"]
        entropy = router["entropy"]
        worse = (
            load >= max(LOAD, WORSE * self.load),
            idle >= max(1, WORSE * self.idle),
            entropy <= min(ENTROPY, self.entropy / WORSE),
            rank >= max(RANK, WORSE_RANK * self.rank),
        )
        if not any(worse):
            return False
        self.load = max(self.load, load)
        self.idle = max(self.idle, idle)
        self.entropy = min(self.entropy, entropy)
        self.rank = max(self.rank, rank)
        return True


class RouterLoads(Hook):
    """Hook that warns on the first process when the loads of a layer's experts have become uneven."""

    def __init__(self) -> None:
        self.reported: dict[str, Reported] = {}

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        if context.run.groups.is_first and metrics.routers:
            for text in self.grown(metrics.routers, context.phase):
                LOG.warning("step %d: %s", metrics.step, text)
        return metrics

    def grown(self, routers: Mapping[str, Mapping[str, float]], phase: ResolvedPhase) -> Iterator[str]:
        """Yield a sentence for each layer whose loads have become clearly worse."""
        specs = {f"layers.{index}": spec for index, spec in enumerate(phase.arch.specs) if isinstance(spec, MoESpec)}
        for layer, router in routers.items():
            rank = router["rank_max_over_mean"]
            if uses_slots(specs[layer], phase):
                rank = 1.0
            if self.reported.setdefault(layer, Reported()).grown(router, rank):
                yield f"{layer}: {numbers(router)}{memory(rank, specs[layer], phase)}"


def numbers(router: Mapping[str, float]) -> str:
    """Return a layer's metrics as a clause."""
    return (
        f"the largest load of an expert is {router['load_max_over_mean']:.1f} times the mean, "
        f"{router['idle']:.0f} experts have no token, entropy {router['entropy']:.2f} of its maximum"
    )


def memory(ratio: float, spec: MoESpec, phase: ResolvedPhase) -> str:
    """Return a clause about the rank with the largest load, or nothing if its load is near the mean.

    ratio: the rank's load, divided by the mean
    """
    if ratio < RANK:
        return ""
    even = even_rows_gib(spec, phase)
    clause = f"; a rank has {ratio:.1f} times the mean number of rows, so a micro-batch needs about "
    clause += f"{ratio * even:.2f} GiB in this layer, not {even:.2f} GiB"
    free = free_memory_gib()
    if free is None:
        return clause
    if free < (ratio - 1) * even:
        return f"{clause}, with {free:.2f} GiB free: this may not fit, use {cure(spec, phase)}"
    return f"{clause}, with {free:.2f} GiB free"


def cure(spec: MoESpec, phase: ResolvedPhase) -> str:
    """Return advice that reduces the memory on the rank with the largest load: a capacity only where it bounds rows."""
    bounded = replace(spec, capacity=1.0)
    if phase.documents is not Documents.isolate and uses_slots(bounded, phase):
        return "a capacity or a smaller micro_batch"
    return "a smaller micro_batch"
