"""Records that a run writes: each step's metrics, and decisions such as to refuse a step or to roll back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Durations are in seconds.

    step, tokens: the step's number in the run, and the tokens that the run has read after it
    loss: mean cross entropy per learned token, without auxiliary losses; nan if the step has no learned token
    step_time, data_wait: the step's duration, and the time in it spent waiting for data
    memory_gib: the first process's peak memory so far, on the device if it counts memory, else on the host
    skipped: steps refused since this start of the run, including those before a rollback, whose lines are gone
    learned: tokens that count in the loss; only if a source has loss masks
    imbalance: with `parallel.context`, the maximum forward FLOPs of a sequence shard over the mean, for the step's
        micro-batches that the first process takes part in
    auxiliary: losses that mixers add, by name, summed over layers
    restarted_lanes: lanes in this phase whose state was not finite and restarted from zero; only if states are carried
    validation: after an evaluation, held-out losses by length
    validation_by_source: if there are several sources, the losses at the first of these lengths
    evaluation: after `run.evaluate`, its metrics by task, length and name
    layers: with `run.layer_norms`, parameter and gradient norms by layer
    hooks: numbers that hooks of `run.hooks` have added, by name

    The sink adds the `time` in UTC, and writes null for a number that is not finite.
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
    restarted_lanes: int | None = None
    validation: Mapping[str, float] | None = None
    validation_by_source: Mapping[str, float] | None = None
    evaluation: Mapping[str, float] | None = None
    layers: Mapping[str, float] | None = None
    hooks: Mapping[str, float] | None = None

    def adding(self, numbers: Mapping[str, float]) -> StepMetrics:
        """Return the metrics with a hook's numbers added, by name."""
        added = {name: float(number) for name, number in numbers.items()}
        return replace(self, hooks={**(self.hooks or {}), **added})

    def line(self) -> dict[str, Any]:
        """Return the values by name. Optional ones are left out if None; the others are always present."""
        return {key: value for key, value in asdict(self).items() if key in REQUIRED or value is not None}

    def numbers(self) -> dict[str, float]:
        """Return all numbers by flat names such as `validation/1x`."""
        return flat(self.line())


OPTIONAL = ("learned", "imbalance", "auxiliary", "restarted_lanes", "validation", "validation_by_source", "evaluation")
OPTIONAL += ("layers", "hooks")
REQUIRED = [name for name in StepMetrics.__dataclass_fields__ if name not in OPTIONAL]


@dataclass(frozen=True)
class Decision:
    """One line of logs/decisions.jsonl: a decision that the run made after a step, and the reason.

    what: `refused` for a step that did not change the weights, or `rolled back`
    loss, norm: the refused step's loss and gradient norm, null if not finite
    limit: the largest norm that would have been accepted, null if there is no limit
    in_a_row: how many consecutive steps were refused
    data: the refused step's batch, as (phase, data step)
    to: the step that the run rolled back to
    times: how often it has rolled back to this checkpoint
    windows: all skipped data ranges so far, as (phase, first, end)
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
        """Return the values by name, without those that are None; norm and limit are always present."""
        return {key: value for key, value in asdict(self).items() if key in ("norm", "limit") or value is not None}


def flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested mappings to numbers by names joined with `/`; other values are dropped."""
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers.update(flat(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float):
            numbers[prefix + key] = value
    return numbers
