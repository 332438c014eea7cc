"""Throughput of a phase's steps, from its model's FLOPs, which are counted once."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.planning.count import count
from hybridtron.planning.share_balance import imbalance, token_costs


class PhaseWork:
    """Rates and load balance in a phase with rows of `seq_len` tokens, on `processes` devices."""

    def __init__(self, config: Config, seq_len: int, processes: int) -> None:
        self.flops_per_token = count(config.model, seq_len).flops_per_token
        self.processes = processes
        self.peak = config.cluster.peak_tflops
        if config.parallel.context > 1:
            self.costs = token_costs(config.model, seq_len)
        else:
            self.costs = None

    def rates(self, tokens_per_second: float) -> tuple[float, float | None]:
        """Return TFLOP/s per device and MFU. MFU is None if the device's peak is unknown."""
        tflops = tokens_per_second * self.flops_per_token / 1e12 / self.processes
        return tflops, None if self.peak is None else tflops / self.peak

    def imbalance(self, batches: Sequence[Batch]) -> float | None:
        """Return the step's load imbalance under context parallelism: a shard's maximum FLOPs over the mean.

        None without context parallelism.
        """
        if self.costs is None:
            return None
        shares = [batch.seq.share for batch in batches]
        costs_by_row = [self.costs.of_shares(s.spans, s.size * s.length, s.size) for s in shares if s is not None]
        return imbalance([sum(share_costs) for share_costs in zip(*costs_by_row, strict=True)])
