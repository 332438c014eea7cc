"""TensorBoard and wandb themselves: a run that is resumed and rolled back, read from their own files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.train.test_metrics import reported, rolled_back

pytestmark = pytest.mark.slow


def test_tensorboard_reads_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # Files are read in the order of their names: second, host, process, and the writer's number in its process. Three
    # writers in one second are in order as long as their numbers have one digit, as in a process that trains.
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer._global_uid._value", 0)
    metrics = reported(tmp_path, 1, 2, 3, 4)
    metrics.on_decision(rolled_back(2))
    metrics.close()
    reported(tmp_path, 3, 4, 5, resumed=2).close()
    read = accumulator.EventAccumulator(str(tmp_path / "logs"))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4, 5]


def test_wandb_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resumed, steps in ((0, (1, 2)), (1, (2, 3))):
        reported(tmp_path, *steps, resumed=resumed, overrides=("run.wandb=project",)).close()
    identity = (tmp_path / "logs" / "wandb_id.txt").read_text()
    names = [path.name for path in (tmp_path / "wandb").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(names) == 2
    number = r"(-\d+)?"  # of a start in the same second as another
    assert all(re.fullmatch(rf"offline-run-\d+_\d+-{identity}{number}", name) for name in names)


@pytest.mark.slow
def test_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for resumed, steps in ((0, (1, 2)), (1, (2, 3))):
        reported(tmp_path, *steps, resumed=resumed, overrides=("run.mlflow=mine", "optim.clip=0.5")).close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "logs" / "mlflow_id.txt").read_text()
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.clip"] == "0.5"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 2, 3]
    assert "validation/1x" in run.data.metrics
