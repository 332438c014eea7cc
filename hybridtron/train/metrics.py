"""Records that a run writes: each step's metrics, and its decisions to refuse a step or to roll back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl: one training step's metrics.

    A refused step is a step whose update was discarded because its loss or gradients were abnormal.

    step: the step's index in the run, from 1
    tokens: how many tokens the run has read, this step included
    loss: mean cross entropy per learned token, without auxiliary losses; nan if the step has no learned token
    step_time: the step's duration in seconds
    data_wait: seconds in which the step waited for data
    tflops_per_device: TFLOP/s of forward and backward passes
    mfu: model FLOPs utilization, None if the device's peak is unknown
    memory_gib: the first process's peak memory so far: device memory if the device reports it, else host memory
    skipped: how many steps were refused in this start of the run; a rollback does not reduce this number
    learned: how many of the step's tokens count in the loss; only if a source has loss masks
    imbalance: only with context parallelism; the sequence shards' maximum forward FLOPs divided by their mean forward
        FLOPs, over the first process's micro-batches
    auxiliary: name -> auxiliary loss, summed over the sub-layers that add it
    routers: only with experts, by layer: `load_max_over_mean`, the largest load of an expert divided by the mean load;
        `idle`, the number of experts without a token; `entropy` of the router's scores divided by its maximum;
        `dropped`, the fraction of choices beyond the experts' capacity; `rank_max_over_mean`, the largest load of a
        rank that divides the experts, divided by the mean load of ranks
    restarted_lanes: only if states are carried from step to step; how often in this phase a sequence's state was
        not finite and was set to zero
    validation: after an evaluation, held-out losses by length, such as `1x` for the training length
    validation_by_source: if there are several sources, each source's held-out loss at the first length
    evaluation: after an evaluation with `run.evaluate`, metrics by task, length and name
    layers: with `run.layer_norms`, parameter and gradient norms by layer
    rank_times: with at least four data-parallel ranks, the median and the largest seconds over all ranks, by section of
        the step before (`slow_ranks.py`)
    slow_ranks: host and rank -> by how much the rank is slower than its peers; only if there are such ranks
    hooks: name -> number that a hook in `run.hooks` has added

    The written line also has the `time` in UTC. In the written line, numbers that are not finite are null.
    """

    step: int
    phase: str
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    step_time: float
    data_wait: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    memory_gib: float
    skipped: int
    learned: int | None = None
    imbalance: float | None = None
    auxiliary: Mapping[str, float] | None = None
    routers: Mapping[str, Mapping[str, float]] | None = None
    restarted_lanes: int | None = None
    validation: Mapping[str, float] | None = None
    validation_by_source: Mapping[str, float] | None = None
    evaluation: Mapping[str, float] | None = None
    layers: Mapping[str, float] | None = None
    rank_times: Mapping[str, float] | None = None
    slow_ranks: Mapping[str, float] | None = None
    hooks: Mapping[str, float] | None = None

    def adding(self, numbers: Mapping[str, float]) -> StepMetrics:
        """Return the metrics with a hook's numbers added, by name."""
        added = {name: float(number) for name, number in numbers.items()}
        return replace(self, hooks={**(self.hooks or {}), **added})

    def line(self) -> dict[str, Any]:
        """Return the values by name. Fields in OPTIONAL are left out if they are None."""
        return {key: value for key, value in asdict(self).items() if key in REQUIRED or value is not None}

    def numbers(self) -> dict[str, float]:
        """Return all numbers by flat names such as `validation/1x`."""
        return flat(self.line())


OPTIONAL = ("learned", "imbalance", "auxiliary", "routers", "restarted_lanes", "validation", "validation_by_source")
OPTIONAL += ("evaluation", "layers", "rank_times", "slow_ranks", "hooks")
REQUIRED = [name for name in StepMetrics.__dataclass_fields__ if name not in OPTIONAL]


@dataclass(frozen=True)
class Decision:
    """One line of logs/decisions.jsonl: the decision to refuse a step or to roll back, and the reason.

    step: the step that was refused, or the step from which the run rolled back
    what: `refused` for a step whose update was discarded, or `rolled back`
    why: the reason, as a sentence for the user
    loss, norm: the refused step's loss and gradient norm, null if not finite
    limit: the largest gradient norm that would have been accepted, null if there is no limit
    in_a_row: how many consecutive steps were refused, this step included
    data: the refused step's batch, as (phase index, index of the batch in the phase's data)
    to: the step to which the run rolled back
    times: how often this start of the run has rolled back to that step
    windows: all data ranges that the run skips so far, each as (phase index, index of the range's first batch, index of
        the first batch after the range)
    """

    step: int
    what: str
    why: str
    loss: float | None = None
    norm: float | None = None
    limit: float | None = None
    in_a_row: int | None = None
    data: Sequence[int] | None = None
    to: int | None = None
    times: int | None = None
    windows: Sequence[Sequence[int]] | None = None

    def line(self) -> dict[str, Any]:
        """Return the values by name. Fields other than norm and limit are left out if they are None."""
        return {key: value for key, value in asdict(self).items() if key in ("norm", "limit") or value is not None}


def flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested mappings: return their numbers, with the keys joined by `/`; other values are dropped."""
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers.update(flat(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float):
            numbers[prefix + key] = value
    return numbers
