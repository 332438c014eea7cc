"""What a run reports of each step, and of what it decides by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Durations are in seconds.

    After an evaluation `validation` holds losses by length, and where there are several sources `validation_by_source`
    those at the first of the lengths; after one of `run.evaluate`, `evaluation` holds its metrics by task, length and
    name. `memory_gib` is the most memory that the first process has held so far: of the device where it counts, else of
    the host. A line also gets the `time` at which it was written, in UTC. A number that is not finite is null, and so
    is the loss of a step in which nothing is learned. `learned`, where sources have masks, are the tokens that count in
    the loss. `skipped` counts the steps that were refused since the run was started or resumed, also those of which no
    line is left since the run rolled back to a checkpoint before them; `restarted_lanes`, where states are carried, the
    lanes of the phase whose state was not finite and that restarted from zero. `auxiliary`, where mixers add losses of
    their own, has each of these by its name, as it is added: a sum over layers. `loss` is without them. `imbalance`,
    where ranks share rows (`parallel.context`), is the forward FLOPs of the share that has most to compute, over the
    mean of all shares: of the rows that the first process has a part of, over all micro-batches of the step.
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

    def line(self) -> dict[str, Any]:
        """Every value that there is; those that every step has are there even if null."""
        return {key: value for key, value in asdict(self).items() if key in REQUIRED or value is not None}

    def numbers(self) -> dict[str, float]:
        """Every number by names such as `validation/1x`."""
        return flat(self.line())


OPTIONAL = ("learned", "imbalance", "auxiliary", "restarted_lanes", "validation", "validation_by_source", "evaluation")
OPTIONAL += ("layers",)
REQUIRED = [name for name in StepMetrics.__dataclass_fields__ if name not in OPTIONAL]


@dataclass(frozen=True)
class Decision:
    """One line of logs/decisions.jsonl: what the run did by itself after a step, and why.

    Of a step `refused`: its loss and gradient norm (null where not finite), the greatest norm that would have been
    accepted (null while there is none), and how many are refused in a row. Of a step after which the run has `rolled
    back`: the step of the checkpoint, how often it returned to it, and all ranges of data skipped by now.
    """

    step: int
    what: str
    why: str
    loss: float | None = None
    norm: float | None = None
    limit: float | None = None
    in_a_row: int | None = None
    to: int | None = None
    times: int | None = None
    windows: Sequence[Sequence[int]] | None = None

    def line(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key in ("norm", "limit") or value is not None}


def flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers.update(flat(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float):
            numbers[prefix + key] = value
    return numbers
