"""Destinations of metrics: metrics.jsonl, the terminal, and the sinks, here stand-ins that record their input."""

from __future__ import annotations

import io as text_io
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hybridtron.config.load import load
from hybridtron.device import Package
from hybridtron.problems import Unusable
from hybridtron.train import sinks
from hybridtron.train import sinks as reporting
from hybridtron.train.logs import RunLog
from hybridtron.train.metrics import Decision, StepMetrics
from hybridtron.train.outcome import Progress
from hybridtron.train.report import announce_end
from hybridtron.train.sinks import ConsoleSink, MetricsWriter, SinkStart
from hybridtron.train.time_log import TimeSpent

STEP = StepMetrics(
    step=10, phase="a", tokens=640, loss=2.5, grad_norm=1.0, lr=1e-3, step_time=0.5, data_wait=0.01,
    tokens_per_second=128.0, tflops_per_device=0.1, mfu=None, memory_gib=0.5, skipped=0, validation={"1x": 2.75},
)  # fmt: skip


class Events:
    """Stand-in for TensorBoard: every opened event file, with its first step and its values."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, list[tuple[int, str, float]]]] = []

    def writer(self, _: str, purge_step: int) -> SimpleNamespace:
        self.opened.append((purge_step, written := []))
        add = lambda name, value, step: written.append((step, name, value))  # noqa: E731
        return SimpleNamespace(add_scalar=add, close=lambda: None)


class Runs:
    """Stand-in for wandb: the options of every start, and all logged values."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[Mapping[str, float]] = []
        self.axes: list[tuple[str, str | None]] = []

    def init(self, **options: Any) -> SimpleNamespace:
        self.started.append(options)
        axis = lambda name, step_metric=None: self.axes.append((name, step_metric))  # noqa: E731
        return SimpleNamespace(log=self.logged.append, define_metric=axis, finish=lambda: None)


class Tracking:
    """Stand-in for MLflow and its client: the steps whose metrics arrived, and the number of calls."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.steps: list[int] = []
        self.calls = 0
        self.ended = 0
        self.fails_from = 10**9  # number of the first call that fails

    def MlflowClient(self, tracking_uri: str) -> Tracking:
        self.addresses.append(tracking_uri)
        return self

    Metric = staticmethod(lambda name, value, time, step: SimpleNamespace(name=name, value=value, step=step))
    Param = staticmethod(lambda name, value: SimpleNamespace(name=name, value=value))

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id=name)

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment_id}/{run_name}"))

    def update_run(self, run: str, status: str) -> None:
        raise ConnectionError(f"no server for {run}\n{status}")

    def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        assert run == "experiment/mine"
        if params:
            assert all(re.fullmatch(r"[\w./: -]+", entry.name) for entry in params)
            return
        self.calls += 1
        if self.calls >= self.fails_from:
            raise ConnectionError("reset by peer\nand more")
        self.steps += [metrics[0].step]

    def set_terminated(self, run: str) -> None:
        self.ended += 1


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Tracking:
    tracking = Tracking()
    with_package(monkeypatch, "mlflow", tracking)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    for name in sinks.MLFLOW_SETTINGS:
        monkeypatch.setenv(name, "set by the user")
    return tracking


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    events = Events()
    with_package(monkeypatch, "tensorboard", SimpleNamespace(SummaryWriter=events.writer))
    return events


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    with_package(monkeypatch, "wandb", runs)
    return runs


def with_package(monkeypatch: pytest.MonkeyPatch, wanted: str, module: object) -> None:
    """Make only this package appear installed."""
    installed = Package(wanted, module, "stand-in")
    absent = Package("", None, "absent")
    monkeypatch.setattr(sinks, "optional_package", lambda name: installed if wanted in name else absent)


def reported(folder: Path, *steps: int, resumed: int = 0, overrides: tuple[str, ...] = ()) -> MetricsWriter:
    """A start of a run that takes these steps."""
    (folder / "logs").mkdir(exist_ok=True)
    metrics = MetricsWriter()
    metrics.start(SinkStart(load(["run.name=mine", *overrides]), folder, resumed, last_step=20))
    for step in steps:
        metrics.write(replace(STEP, step=step))
    return metrics


def rolled_back(to: int) -> Decision:
    """The record of a rollback to a step."""
    return Decision(to + 2, "rolled back", "2 steps in a row were refused", to=to)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Parse each line with a strict JSON reader."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_line_is_json_with_its_time(tmp_path: Path) -> None:
    metrics = reported(tmp_path, 1)
    metrics.write(replace(STEP, step=2, loss=math.nan, grad_norm=math.inf, validation={"1x": math.nan}))
    metrics.close()
    first, second = lines(tmp_path)
    assert (second["loss"], second["grad_norm"], second["validation"]) == (None, None, {"1x": None})
    assert first["memory_gib"] == 0.5
    assert datetime.fromisoformat(first["time"]) <= datetime.fromisoformat(second["time"])
    assert datetime.fromisoformat(first["time"]).tzinfo is not None


def test_tensorboard_gets_every_number(events: Events, tmp_path: Path) -> None:
    reported(tmp_path, 10).close()
    [(_, written)] = events.opened
    numbers = {name: value for step, name, value in written if step == 10}
    assert (numbers["loss"], numbers["validation/1x"]) == (2.5, 2.75)
    assert not {"mfu", "phase", "time"} & set(numbers)


def test_tensorboard_drops_repeated_steps(events: Events, tmp_path: Path) -> None:
    metrics = reported(tmp_path, 1, 2, 3, 4)
    metrics.on_decision(rolled_back(2))
    metrics.write(replace(STEP, step=3))
    metrics.close()
    reported(tmp_path, 3, resumed=2).close()
    assert [(first, sorted({step for step, _, _ in written})) for first, written in events.opened] == [
        (1, [1, 2, 3, 4]),
        (3, [3]),
        (3, [3]),
    ]


def test_mlflow_gets_every_step_from_its_thread(tracking: Tracking, tmp_path: Path) -> None:
    reported(tmp_path, 1, 2, 3, overrides=("run.mlflow=experiment",)).close()
    assert tracking.addresses == ["http://tracking.example"]
    assert tracking.steps == [1, 2, 3]
    assert tracking.ended == 1
    assert {os.environ[name] for name in sinks.MLFLOW_SETTINGS} == {"set by the user"}


def test_mlflow_that_fails_during_training_does_not_end_it(
    tracking: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking.fails_from = 3
    with caplog.at_level(logging.WARNING):
        reported(tmp_path, *range(1, 20), overrides=("run.mlflow=experiment",)).close()
    assert tracking.steps == [1, 2]
    assert tracking.calls == 5  # two arrive, three fail, and none is tried after them
    assert [line.split(":")[0] for line in caplog.messages[:2]] == [
        f"metrics of step {step} did not reach MLflow" for step in (3, 4)
    ]
    assert caplog.messages[-1].startswith("nothing more is sent to MLflow")
    assert tracking.ended == 0


def test_mlflow_that_fails_at_the_end_does_not_fail_the_run(
    tracking: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise ConnectionError("closed")

    monkeypatch.setattr(tracking, "set_terminated", refuse)
    with caplog.at_level(logging.WARNING):
        reported(tmp_path, 1, overrides=("run.mlflow=experiment",)).close()
    assert tracking.steps == [1]
    assert caplog.messages[-1].startswith("the end of the run did not reach MLflow")


def test_mlflow_that_is_unreachable_at_the_start_is_refused(tracking: Tracking, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/mlflow_id.txt").write_text("experiment/mine")
    with pytest.raises(Unusable, match=re.escape("http://tracking.example")) as refusal:
        reported(tmp_path, 1, overrides=("run.mlflow=experiment",))
    assert refusal.value.code == "unavailable"
    assert "\n" not in str(refusal.value)


def test_wandb_resumes_the_same_run_with_its_configuration(runs: Runs, tmp_path: Path) -> None:
    wanted = ("run.wandb=project", "optim.clip=0.5")
    reported(tmp_path, 1, 2, overrides=wanted).close()
    reported(tmp_path, 2, 3, resumed=1, overrides=wanted).close()
    first, second = runs.started
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("project", "mine", "allow")
    assert first["config"]["optim"]["clip"] == 0.5
    assert json.dumps(first["config"])
    assert [metrics["step"] for metrics in runs.logged] == [1, 2, 2, 3]
    assert ("*", "step") in runs.axes
    other = tmp_path / "other"
    other.mkdir()
    reported(other, overrides=wanted).close()
    assert runs.started[2]["id"] != first["id"]


def test_terminals_show_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = text_io.StringIO()
    monkeypatch.setattr(reporting, "Console", lambda: Console(file=screen, force_terminal=True, width=160))
    report = ConsoleSink(log_every=10, first_step=0, last_step=20)
    report.write(STEP)
    report.close()
    assert "step 10/20" in screen.getvalue()
    assert "1x 2.7500" in screen.getvalue()


def test_output_without_a_terminal_is_a_line_per_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    report = ConsoleSink(log_every=5, first_step=4, last_step=3010)
    monkeypatch.setattr("time.monotonic", lambda: 12.0)
    for step in (9, 10):
        report.write(replace(STEP, step=step, validation=None))
    report.close()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 10/3010  loss 2.5000  lr 1.00e-03  grad norm 1.000  128 tokens/s")
    assert line.endswith("1:40:00 left")  # six steps took 12 s, and 3000 are left


def test_a_kill_while_truncating_metrics_leaves_them_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "".join(f'{{"step": {step}}}\n' for step in range(1, 9))
    (tmp_path / "metrics.jsonl").write_text(before)

    def killed(path: Path, _: str) -> None:
        path.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter().start(SinkStart(load(["run.name=mine"]), tmp_path, resumed_step=5, last_step=20))
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_the_final_message_names_duration_checkpoint_and_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 3723.0)
    progress = Progress(step=20, validation={"1x": 3.5}, began=0.0)
    with RunLog(0):
        spent = TimeSpent(2, 1.0, 1, {"steps": 90.0, "start": 10.0})
        announce_end(progress, Path("runs/mine"), Path("runs/mine/checkpoints/step-00000020"), spent)
    said = capsys.readouterr().out
    assert all(word in said for word in ("20", "1:02:03", "3.5000", "step-00000020"))
    assert "time: 0:01:40 in 2 starts: 90.0% steps, 10.0% start" in said
    for command in ("generate", "plot", "evaluate", "export"):
        assert f"hybridtron {command} runs/mine" in said
