"""Throughput and load balance of a phase's steps, from the FLOPs of its model."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.data.batch import Batch
from hybridtron.planning.context_balance import imbalance, token_costs
from hybridtron.planning.count import count


class Throughput:
    """Computes FLOP rates and the load balance for a phase's steps. Each of the `processes` has one device."""

    def __init__(self, phase: ResolvedPhase, processes: int) -> None:
        seq_len = phase.settings.seq_len
        self.flops_per_token = count(phase.arch, seq_len).flops_per_token
        self.processes = processes
        self.peak = phase.config.cluster.peak_tflops
        if phase.config.parallel.context > 1:
            self.costs = token_costs(phase.arch, seq_len)
        else:
            self.costs = None

    def rates(self, tokens_per_second: float) -> tuple[float, float | None]:
        """Return TFLOP/s per device, and model FLOPs utilization, which is None if the device's peak is unknown."""
        tflops = tokens_per_second * self.flops_per_token / 1e12 / self.processes
        return tflops, None if self.peak is None else tflops / self.peak

    def imbalance(self, batches: Sequence[Batch]) -> float | None:
        """Return a step's load imbalance: the largest FLOPs among the sequence shards, divided by their mean.

        Without context parallelism there is one shard, and the result is None.
        """
        if self.costs is None:
            return None
        shards = [batch.seq.shard for batch in batches]
        costs_by_row = [self.costs.of_shards(s.spans, s.size * s.length, s.size) for s in shards if s is not None]
        return imbalance([sum(shard_costs) for shard_costs in zip(*costs_by_row, strict=True)])
