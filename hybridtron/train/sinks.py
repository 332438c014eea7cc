"""Where the metrics of each step are written: the sinks of a run, found by name in `SINKS`.

A sink is made where a run starts, resumes or rolls back; some steps may then be taken again. metrics.jsonl is cut back
to the resumed step. TensorBoard drops what was written of later steps (`purge_step`). wandb keeps its history; there
the steps are an axis of their own, so that they may decrease, and the run that is resumed is the same one there, as
its id is kept in the run's folder.

Another sink: a class with these two methods, and one line in `SINKS` (docs/extending.md).
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
from hybridtron.train.metrics import Decision, StepMetrics
from hybridtron.train.outcome import finite
from hybridtron.train.records import read_lines, write_whole

LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the metrics of every step, on the first process."""

    def write(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkStart:
    """What a sink is made from: the run, and how far it is when it starts; steps after `resumed_step` follow."""

    config: Config
    run_dir: Path
    resumed_step: int
    last_step: int


class JsonLines:
    """metrics.jsonl: one line a step."""

    def __init__(self, start: SinkStart) -> None:
        path = start.run_dir / "metrics.jsonl"
        kept = [json.dumps(line) for line in read_lines(path) if line["step"] <= start.resumed_step]
        write_whole(path, "".join(f"{line}\n" for line in kept))
        self.file = path.open("a", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        written = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.file.write(json.dumps(finite({**metrics.line(), "time": written}), allow_nan=False) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files in logs/; those of steps that are taken again are marked as purged."""

    def __init__(self, module: Any, start: SinkStart) -> None:
        self._writer = module.SummaryWriter(str(start.run_dir / "logs"), purge_step=start.resumed_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.numbers().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One wandb run for all starts of a run; `config/check.py` has seen that the package is there."""

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
        self._run.define_metric("*", step_metric="step")  # wandb's own counter can't decrease, and drops what does

    def write(self, metrics: StepMetrics) -> None:
        self._run.log({**metrics.numbers(), "step": metrics.step})

    def close(self) -> None:
        self._run.finish()


def tensorboard_if_installed(start: SinkStart) -> Sink | None:
    if optional_package("tensorboard").module is None:
        return None
    module = optional_package("torch.utils.tensorboard").module
    return None if module is None else TensorBoard(module, start)


def wandb_if_wanted(start: SinkStart) -> Sink | None:
    return None if start.config.run.wandb is None else Wandb(start)


def console(start: SinkStart) -> Sink:
    return ConsoleSink(start.config.run.log_every, start.resumed_step, start.last_step)


SINKS: dict[str, Callable[[SinkStart], Sink | None]] = {
    "jsonl": JsonLines,
    "console": console,
    "tensorboard": tensorboard_if_installed,
    "wandb": wandb_if_wanted,
}
"""By name, what makes each sink at the start of a run; None where the run does not ask for it."""


class Metrics:
    """The sinks of a run, and logs/decisions.jsonl, to which each start of a run adds."""

    def __init__(self, run_dir: Path, config: Config, resumed_step: int, last_step: int) -> None:
        self.decisions = run_dir / "logs" / "decisions.jsonl"
        self.sinks: list[Sink] = []
        self.start(SinkStart(config, run_dir, resumed_step, last_step))

    def start(self, start: SinkStart) -> None:
        """From here on metrics go to sinks of this start; what was written of later steps no longer holds."""
        self.close()
        self.started = start
        self.sinks += [sink for make in SINKS.values() if (sink := make(start)) is not None]

    def write(self, metrics: StepMetrics) -> None:
        for sink in self.sinks:
            sink.write(metrics)

    def decide(self, decision: Decision) -> None:
        """Record a decision, in the log too."""
        with self.decisions.open("a") as file:
            file.write(json.dumps(finite(decision.line()), allow_nan=False) + "\n")
        LOG.warning("step %d %s: %s", decision.step, decision.what.upper(), decision.why)

    def roll_back(self, step: int) -> None:
        """The run continues from an earlier step."""
        self.start(replace(self.started, resumed_step=step))

    def close(self) -> None:
        while self.sinks:
            self.sinks.pop().close()


def _run_id(path: Path) -> str:
    """The id that wandb knows the run by, made at its first start."""
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()
