"""Sinks: the destinations of a run's metrics. `SINKS` has all sinks by name.

Sinks are created when a run starts, resumes from a checkpoint or rolls back to a checkpoint. Steps after the checkpoint
may already have been recorded. The old records are treated as follows:

    metrics.jsonl   The old lines are removed.
    TensorBoard     The old events are hidden (`purge_step`).
    wandb           The old records are kept. The x-axis is the metric `step`, which may decrease. A resumed run
                    continues the wandb run whose id is stored in the run's folder.
    MLflow          The old records are kept, and a repeated step has several values. A resumed run continues the MLflow
                    run whose id is stored in the run's folder.

To add a sink, write a class with the methods of `Sink`, and a line in `SINKS` (docs/extending.md).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hybridtron.config.load import to_plain, values_by_key
from hybridtron.config.schema import Config
from hybridtron.device import optional_package
from hybridtron.problems import Unusable, first_line
from hybridtron.train.hooks import Hook, RunContext, StepContext
from hybridtron.train.jsonl import read_lines, write_whole
from hybridtron.train.metrics import Decision, StepMetrics
from hybridtron.train.outcome import clock, finite

LOG = logging.getLogger(__name__)

MLFLOW_SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # otherwise MLflow refuses to write to files, a store that it no longer develops
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; by default, a server that does not answer causes a delay of minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Environment variables for MLflow, unless the user has set them."""


class Sink(Protocol):
    """A destination for metrics. Only the first process has sinks."""

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step; called after every step."""
        ...

    def close(self) -> None:
        """Flush and close. A closed sink is not used any more."""
        ...


@dataclass(frozen=True)
class SinkStart:
    """Inputs for a new sink. The first step that the sink will receive is `resumed_step` + 1."""

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


class ConsoleSink:
    """Sink that shows a progress bar on a terminal, or else prints a line every `log_every` steps.

    Results of evaluations are printed in both cases. The remaining time is the number of remaining steps, multiplied by
    the mean time per step since this sink was created. Evaluations and checkpoints are included in the mean.
    """

    def __init__(self, log_every: int, first_step: int, last_step: int) -> None:
        self.console = Console()
        self.first_step, self.began = first_step, time.monotonic()
        self.log_every = log_every
        self.last_step = last_step
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=last_step, completed=first_step)
            self.bar.start()

    def write(self, metrics: StepMetrics) -> None:
        added = "".join(f"  {name} {loss:.4f}" for name, loss in (metrics.auxiliary or {}).items())
        if metrics.routers:
            largest = max(router["load_max_over_mean"] for router in metrics.routers.values())
            added += f"  load max/mean {largest:.2f}"
            dropped = max(router["dropped"] for router in metrics.routers.values())
            if dropped:
                added += f"  dropped {dropped:.1%}"
        summary = (
            f"loss {metrics.loss:.4f}{added}  lr {metrics.lr:.2e}  grad norm {metrics.grad_norm:.3f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=metrics.step, description=summary)
        elif metrics.step % self.log_every == 0 or metrics.step == self.last_step:
            print(f"step {metrics.step}/{self.last_step}  {summary}  {self._left(metrics.step)}", flush=True)
        if metrics.validation:
            losses = "  ".join(f"{length} {loss:.4f}" for length, loss in metrics.validation.items())
            text = f"step {metrics.step}  validation loss at multiples of the training length: {losses}"
            self.console.print(text, highlight=False, soft_wrap=True)  # rich prints this above a progress bar
        if metrics.evaluation:
            values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.evaluation.items())
            self.console.print(f"step {metrics.step}  {values}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _left(self, step: int) -> str:
        pace = (time.monotonic() - self.began) / (step - self.first_step)
        return f"{clock(pace * (self.last_step - step))} left"


class TensorBoard:
    """Sink to TensorBoard event files in logs/. Old events of steps after `resumed_step` are hidden."""

    def __init__(self, module: Any, start: SinkStart) -> None:
        self._writer = module.SummaryWriter(str(start.run_dir / "logs"), purge_step=start.resumed_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.numbers().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Sink to Weights & Biases. All starts of a run write to one wandb run.

    The package is installed, as the check of the configuration has ensured.
    """

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
        # The metric `step` replaces wandb's step counter, which can't decrease: after a rollback wandb would drop data.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: StepMetrics) -> None:
        self._run.log({**metrics.numbers(), "step": metrics.step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Sink to MLflow. All starts of a run write to one MLflow run, in the experiment that `run.mlflow` names.

    The environment variable MLFLOW_TRACKING_URI selects a server or a store. Without it, MLflow writes files to
    `mlflow/` in the run's folder. A thread sends the metrics, so that training does not wait for a server. A server
    that fails during training causes a warning, and no further metrics are sent after `FAILURES` failures in a row.

    The package is installed, as the check of the configuration has ensured.
    """

    FAILURES = 3
    AT_ONCE = 1000  # maximum number of metrics in a request to MLflow
    PARAMETERS = 100  # maximum number of parameters in a request
    CHARACTERS = 6000  # maximum length of a parameter's value

    def __init__(self, start: SinkStart) -> None:
        for name, value in MLFLOW_SETTINGS.items():
            os.environ.setdefault(name, value)
        module: Any = optional_package("mlflow").module
        self._entities: Any = optional_package("mlflow.entities").module
        address = os.environ.get("MLFLOW_TRACKING_URI") or (start.run_dir / "mlflow").resolve().as_uri()
        try:
            self._client = module.MlflowClient(tracking_uri=address)
            self._run = self._continued_or_new_run(start)
        except Exception as error:  # a server may answer anything, and errors come from several libraries
            cure = "check MLFLOW_TRACKING_URI and the server, or leave run.mlflow out"
            message = f"MLflow at {address} can't be used: {first_line(error)}; {cure}"
            raise Unusable(message, code="unavailable") from error
        self._failures = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")

    def write(self, metrics: StepMetrics) -> None:
        now = round(time.time() * 1000)
        values = [
            self._entities.Metric(_mlflow_name(name), value, now, metrics.step)
            for name, value in metrics.numbers().items()
        ]
        for begin in range(0, len(values), self.AT_ONCE):
            part = values[begin : begin + self.AT_ONCE]
            call = partial(self._client.log_batch, self._run, metrics=part)
            self._thread.submit(self._send, f"metrics of step {metrics.step}", call)

    def close(self) -> None:
        self._thread.submit(self._send, "the end of the run", partial(self._client.set_terminated, self._run))
        self._thread.shutdown()

    def _send(self, content: str, call: Callable[[], object]) -> None:
        """Call MLflow, unless it has failed too often; runs in the thread. `content` names what the call sends."""
        if self._failures >= self.FAILURES:
            return
        try:
            call()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            LOG.warning("%s did not reach MLflow: %s", content, first_line(error))
            if self._failures == self.FAILURES:
                LOG.warning("nothing more is sent to MLflow; a resumed run tries again")

    def _continued_or_new_run(self, start: SinkStart) -> str:
        """Return the id of the MLflow run: the stored id if there is one, else the id of a new run."""
        path = start.run_dir / "logs" / "mlflow_id.txt"
        if path.exists():
            run = path.read_text().strip()
            self._client.update_run(run, status="RUNNING")
            return run
        name = start.config.run.mlflow
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            number = self._client.create_experiment(name)
        else:
            number = experiment.experiment_id
        run = self._client.create_run(number, run_name=start.config.run.name).info.run_id
        parameters = [
            self._entities.Param(_mlflow_name(key), str(value)[: self.CHARACTERS])
            for key, value in values_by_key(start.config).items()
        ]
        for begin in range(0, len(parameters), self.PARAMETERS):
            self._client.log_batch(run, params=parameters[begin : begin + self.PARAMETERS])
        path.write_text(run)
        return run


def tensorboard_if_installed(start: SinkStart) -> Sink | None:
    """Build the TensorBoard sink, or return None if the package tensorboard or torch's writer can't be imported."""
    if optional_package("tensorboard").module is None:
        return None
    module = optional_package("torch.utils.tensorboard").module
    if module is None:
        return None
    return TensorBoard(module, start)


def wandb_if_wanted(start: SinkStart) -> Sink | None:
    """Build the wandb sink, or return None if `run.wandb` names no project."""
    if start.config.run.wandb is None:
        return None
    return Wandb(start)


def mlflow_if_wanted(start: SinkStart) -> Sink | None:
    """Build the MLflow sink, or return None if `run.mlflow` names no experiment."""
    if start.config.run.mlflow is None:
        return None
    return Mlflow(start)


def console(start: SinkStart) -> Sink:
    """Build the sink that shows progress on the console."""
    return ConsoleSink(start.config.run.log_every, start.resumed_step, start.last_step)


SINKS: dict[str, Callable[[SinkStart], Sink | None]] = {
    "jsonl": JsonLines,
    "console": console,
    "tensorboard": tensorboard_if_installed,
    "wandb": wandb_if_wanted,
    "mlflow": mlflow_if_wanted,
}
"""A sink's name -> its factory. A factory returns None for a sink that the run does not use."""


class MetricsWriter(Hook):
    """Hook that writes metrics to all sinks, and decisions to logs/decisions.jsonl; only the first process writes."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.started: SinkStart | None = None  # inputs of the present sinks; None on processes that do not write

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
        self.close()  # a progress bar would disturb the messages at the end of the run

    def start(self, start: SinkStart) -> None:
        """Close the present sinks, and create sinks for the steps after `start.resumed_step`."""
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
    """Return the run's id at wandb, from the file at `path`; if the file is missing, draw a random id and store it."""
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _mlflow_name(name: str) -> str:
    """Return a name with only the characters that MLflow allows; every other character becomes `_`."""
    return re.sub(r"[^\w./: -]", "_", name)
