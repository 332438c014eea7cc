"""Sinks: the destinations of a run's metrics, by name in `SINKS`.

Sinks are created when a run starts, resumes or rolls back. Steps after the resumed one are then repeated, and each sink
deals with its old records. metrics.jsonl is truncated after the resumed step. TensorBoard purges later steps
(`purge_step`). wandb keeps its history: there the step is a separate metric, which may decrease, and a resumed run
continues the same wandb run, whose id is kept in the run's folder.

To add a sink, write a class with the methods of `Sink`, and a line in `SINKS` (docs/extending.md).
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from hybridtron.config.load import to_plain
from hybridtron.config.schema import Config
from hybridtron.device import optional_package
from hybridtron.train.console import ConsoleSink
from hybridtron.train.hooks import Hook, RunContext, StepContext
from hybridtron.train.metrics import Decision, StepMetrics
from hybridtron.train.outcome import finite
from hybridtron.train.records import read_lines, write_whole

LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination of metrics. It exists on the first process only."""

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step; called after every step."""
        ...

    def close(self) -> None:
        """Flush and close. A sink is not used after this."""
        ...


@dataclass(frozen=True)
class SinkStart:
    """Inputs of a new sink. The first step that it will receive is `resumed_step` + 1."""

    config: Config
    run_dir: Path
    resumed_step: int
    last_step: int


class JsonLines:
    """Sink to metrics.jsonl, one line for each step."""

    def __init__(self, start: SinkStart) -> None:
        path = start.run_dir / "metrics.jsonl"
        lines = [json.dumps(line) for line in read_lines(path) if line["step"] <= start.resumed_step]
        write_whole(path, "".join(f"{line}\n" for line in lines))
        self.file = path.open("a", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        written = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.file.write(json.dumps(finite({**metrics.line(), "time": written}), allow_nan=False) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Sink to TensorBoard event files in logs/. Earlier events of repeated steps are purged."""

    def __init__(self, module: Any, start: SinkStart) -> None:
        self._writer = module.SummaryWriter(str(start.run_dir / "logs"), purge_step=start.resumed_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.numbers().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Sink to Weights & Biases: one wandb run for all starts of a run. The package's presence was checked before."""

    def __init__(self, start: SinkStart) -> None:
        module: Any = optional_package("wandb").module
        self._run = module.init(
            project=start.config.run.wandb,
            name=start.config.run.name,
            dir=str(start.run_dir),
            id=_run_id(start.run_dir / "logs" / "wandb_id.txt"),
            resume="allow",
            config=to_plain(start.config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # wandb's own counter can't decrease: it drops earlier steps

    def write(self, metrics: StepMetrics) -> None:
        self._run.log({**metrics.numbers(), "step": metrics.step})

    def close(self) -> None:
        self._run.finish()


def tensorboard_if_installed(start: SinkStart) -> Sink | None:
    """Build the TensorBoard sink, or return None if the package or torch's writer for it is missing."""
    if optional_package("tensorboard").module is None:
        return None
    module = optional_package("torch.utils.tensorboard").module
    if module is None:
        return None
    return TensorBoard(module, start)


def wandb_if_wanted(start: SinkStart) -> Sink | None:
    """Build the wandb sink if `run.wandb` names a project."""
    if start.config.run.wandb is None:
        return None
    return Wandb(start)


def console(start: SinkStart) -> Sink:
    """Build the sink that shows progress on the console."""
    return ConsoleSink(start.config.run.log_every, start.resumed_step, start.last_step)


SINKS: dict[str, Callable[[SinkStart], Sink | None]] = {
    "jsonl": JsonLines,
    "console": console,
    "tensorboard": tensorboard_if_installed,
    "wandb": wandb_if_wanted,
}
"""Factories of the sinks, by name. A factory returns None for a sink that the run does not use."""


class MetricsWriter(Hook):
    """Hook that writes metrics to all sinks, and decisions to logs/decisions.jsonl. The first process writes."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.started: SinkStart | None = None  # None on processes that do not write

    def on_run_start(self, run: RunContext) -> None:
        if run.groups.is_first:
            self.start(SinkStart(run.config, run.run_dir, run.resumed_step, run.last_step))

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        self.write(metrics)
        return metrics

    def on_decision(self, decision: Decision) -> None:
        if self.started is None:
            return
        with (self.started.run_dir / "logs" / "decisions.jsonl").open("a") as file:
            file.write(json.dumps(finite(decision.line()), allow_nan=False) + "\n")
        LOG.warning("step %d %s: %s", decision.step, decision.what.upper(), decision.why)
        if decision.to is not None:
            self.start(replace(self.started, resumed_step=decision.to))

    def on_run_end(self, run: RunContext) -> None:
        self.close()  # before the report of the run's end, which a progress bar would disturb

    def start(self, start: SinkStart) -> None:
        """Replace the sinks by new ones that start after `start.resumed_step`."""
        self.close()
        self.started = start
        self.sinks += [sink for make in SINKS.values() if (sink := make(start)) is not None]

    def write(self, metrics: StepMetrics) -> None:
        for sink in self.sinks:
            sink.write(metrics)

    def close(self) -> None:
        while self.sinks:
            self.sinks.pop().close()


def _run_id(path: Path) -> str:
    """Return the run's id at wandb. The first start draws it and stores it at `path`."""
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()
