"""What a run reports: one JSON line a step, a console line or progress bar, and the sinks that are wanted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hybridtron.config.schema import Config
from hybridtron.train.outcome import clock, finite
from hybridtron.train.sinks import open_sinks


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Durations are in seconds.

    After an evaluation `validation` holds losses by length, and where there are several sources `validation_by_source`
    those at the first of the lengths. `memory_gib` is the most memory that the first process has held so far: of the
    device where it counts, else of the host. A line also gets the `time` at which it was written, in UTC. A number that
    is not finite is null. `skipped` counts the steps that were refused since the run was started or resumed, also those
    of which no line is left since the run went back to a checkpoint before them; `restarted_lanes`, where states are
    carried, the lanes of the phase whose state was not finite and that started anew.
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
    restarted_lanes: int | None = None
    validation: Mapping[str, float] | None = None
    validation_by_source: Mapping[str, float] | None = None
    layers: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Decision:
    """One line of logs/decisions.jsonl: what the run did by itself after a step, and why.

    Of a step `refused`: its loss and gradient norm (null where not finite), the greatest norm that would have been
    accepted (null while there is none), and how many are refused in a row. Of a step after which the run has `gone
    back`: the step of the checkpoint, how often it went back to it, and all data windows left out by now.
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


class Metrics:
    """Writes every step, and every decision, to each place that was asked for.

    A resumed run's file is cut back to the resumed step. Decisions are added to those of earlier starts.
    """

    def __init__(self, run_dir: Path, config: Config, resumed_step: int, last_step: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.decisions = run_dir / "logs" / "decisions.jsonl"
        self.file = self._cut_back(resumed_step)
        self.console = ConsoleReport(config.run.log_every, resumed_step, last_step)
        self.sinks = open_sinks(config, run_dir, resumed_step)

    def write(self, metrics: StepMetrics) -> None:
        line = {key: value for key, value in asdict(metrics).items() if key in REQUIRED or value is not None}
        written = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.file.write(json.dumps(finite({**line, "time": written}), allow_nan=False) + "\n")
        self.console.write(metrics)
        numbers = _flat(line)
        for sink in self.sinks:
            sink.write(metrics.step, numbers)

    def decide(self, decision: Decision) -> None:
        """A decision, on the console too."""
        line = {key: value for key, value in asdict(decision).items() if key in ("norm", "limit") or value is not None}
        with self.decisions.open("a") as file:
            file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self.console.say(f"step {decision.step} {decision.what.upper()}: {decision.why}")

    def go_back(self, step: int) -> None:
        """The run goes on from an earlier step; what was written of later ones no longer holds."""
        self.file.close()
        self.file = self._cut_back(step)
        self.console.roll_back(step)
        for sink in self.sinks:
            sink.roll_back(step)

    def _cut_back(self, step: int) -> TextIO:
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= step]
        aside = self.path.with_name(f".{self.path.name}.aside")  # a kill in between must not cost the lines that stay
        aside.write_text("".join(f"{line}\n" for line in kept))
        aside.rename(self.path)
        return self.path.open("a", buffering=1)

    def close(self) -> None:
        self.console.close()
        self.file.close()
        for sink in self.sinks:
            sink.close()


OPTIONAL = ("restarted_lanes", "validation", "validation_by_source", "layers")
REQUIRED = [name for name in StepMetrics.__dataclass_fields__ if name not in OPTIONAL]


class ConsoleReport:
    """A live bar on a terminal; elsewhere one plain line every `log_every` steps and at every evaluation.

    The time left is that of the steps that are left at the pace of this start so far, evaluations and saves included.
    """

    def __init__(self, log_every: int, first_step: int, last_step: int) -> None:
        self.console = Console()
        self.first_step, self.began = first_step, time.monotonic()
        self.log_every, self.last_step = log_every, last_step
        self.bar: Progress | None = None
        if self.console.is_terminal:
            columns = [
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            ]
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=last_step, completed=first_step)
            self.bar.start()

    def write(self, metrics: StepMetrics) -> None:
        summary = (
            f"loss {metrics.loss:.4f}  lr {metrics.lr:.2e}  grad norm {metrics.grad_norm:.3f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=metrics.step, description=summary)
        elif metrics.step % self.log_every == 0 or metrics.step == self.last_step:
            print(f"step {metrics.step}/{self.last_step}  {summary}  {self._left(metrics.step)}", flush=True)
        if metrics.validation:
            losses = "  ".join(f"{length} {loss:.4f}" for length, loss in metrics.validation.items())
            self.say(f"step {metrics.step}  validation loss at multiples of the training length: {losses}")

    def roll_back(self, step: int) -> None:
        """The pace is measured anew from here."""
        self.first_step, self.began = step, time.monotonic()

    def _left(self, step: int) -> str:
        pace = (time.monotonic() - self.began) / (step - self.first_step)
        return f"{clock(pace * (self.last_step - step))} left"

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _lines(path: Path) -> list[str]:
    """The whole lines of a metrics file; a last line cut short by a kill is dropped."""
    return [line[:-1] for line in path.open() if line.endswith("\n")] if path.exists() else []


def _flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers.update(_flat(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float):
            numbers[prefix + key] = value
    return numbers
