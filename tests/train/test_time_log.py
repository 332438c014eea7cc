"""Time of a run by section, over starts and rollbacks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from hybridtron.cluster import status
from hybridtron.engine.engine import Engine
from hybridtron.train import time_log
from hybridtron.train.metrics import StepMetrics
from hybridtron.train.time_log import StartRecord, TimeLog, add_up, read_time
from tests.train.conftest import Train


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_log, "time", clock)
    return clock


def metrics_of(step: int, step_time: float, data_wait: float) -> StepMetrics:
    return StepMetrics(
        step=step, phase="base", tokens=0, loss=1.0, grad_norm=1.0, lr=1e-3, step_time=step_time, data_wait=data_wait,
        tokens_per_second=1.0, tflops_per_device=1.0, mfu=None, memory_gib=1.0, skipped=0,
    )  # fmt: skip


def test_time_counts_to_the_innermost_section(tmp_path: Path, clock: Clock) -> None:
    log = TimeLog(tmp_path, 8, 0, age_s=5.0)
    clock.now += 2
    with log.spent_on("steps"):
        clock.now += 10
        log.count_step(metrics_of(1, 10.0, 1.0), accepted=True)
        clock.now += 10
        log.count_step(metrics_of(2, 10.0, 2.0), accepted=False)
        with log.spent_on("checkpoints"):
            clock.now += 4
        log.count_save(3.0)
    log.close()
    spent = read_log(tmp_path)
    assert spent.seconds == {"steps": 9.0, "refused": 8.0, "start": 7.0, "checkpoints": 4.0, "data": 3.0}
    assert spent.total == 31.0
    assert (spent.processes, spent.save_s, spent.start_s) == (8, 3.0, 7.0)


def read_log(folder: Path) -> time_log.TimeSpent:
    lines = [json.loads(line) for line in (folder / time_log.FILE).read_text().splitlines()]
    return add_up(time_log.records_of(lines))


def test_steps_that_a_later_start_trains_again_are_repeated() -> None:
    first = StartRecord(began=0, ended=110, processes=2, resumed=0, step=10, trained=10, seconds={"steps": 100.0})
    second = StartRecord(began=150, ended=200, processes=2, resumed=6, step=10, trained=4, seconds={"steps": 40.0})
    spent = add_up([first, second])
    assert spent.seconds == {"steps": 100.0, "between": 40.0, "repeated": 40.0}
    assert spent.words() == "55.6% steps, 22.2% between, 22.2% repeated"


def test_a_start_that_died_before_its_first_step_repeats_nothing(tmp_path: Path, clock: Clock) -> None:
    first = StartRecord(began=0, ended=100, processes=1, resumed=0, step=10, trained=10, seconds={"steps": 100.0})
    died = TimeLog(tmp_path, 1, 10).record
    last = StartRecord(began=2000, ended=2100, processes=1, resumed=10, step=20, trained=10, seconds={"steps": 100.0})
    assert add_up([first, died]).seconds["steps"] == 100.0
    assert add_up([first, died, last]).seconds["steps"] == 200.0


def test_steps_that_a_rollback_discards_are_repeated(tmp_path: Path, clock: Clock) -> None:
    log = TimeLog(tmp_path, 1, 0)
    with log.spent_on("steps"):
        for step in (1, 2, 3, 4):
            clock.now += 1
            log.count_step(metrics_of(step, 1.0, 0.0), accepted=True)
    log.count_rollback(4, 2)
    with log.spent_on("steps"):
        for step in (3, 4):
            clock.now += 1
            log.count_step(metrics_of(step, 1.0, 0.0), accepted=True)
    assert log.spent().seconds == {"steps": 4.0, "repeated": 2.0}


def test_a_log_of_another_run_in_the_folder_is_dropped(tmp_path: Path, clock: Clock) -> None:
    TimeLog(tmp_path, 1, 0, age_s=1.0).close()
    assert TimeLog(tmp_path, 1, 0, age_s=1.0).spent().starts == 2
    assert TimeLog(tmp_path, 1, 0, age_s=1.0, continued=False).spent().starts == 1
    assert read_log(tmp_path).starts == 1


def test_lines_of_another_version_are_left_out(tmp_path: Path) -> None:
    record = StartRecord(began=0, ended=1, processes=1, resumed=0, step=0, seconds={"start": 1.0})
    (tmp_path / "logs").mkdir()
    lines = [json.dumps(line) + "\n" for line in ({"began": 0.0}, asdict(record))]
    (tmp_path / "logs" / time_log.FILE).write_text("".join(lines))
    spent = read_time(tmp_path)
    assert spent is not None
    assert spent.starts == 1


def test_a_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(time_log, "write_whole", full)
    TimeLog(tmp_path, 1, 0).close()
    assert "can't be written" in caplog.text


@pytest.mark.slow
def test_a_run_that_was_killed_counts_its_repeated_steps(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Engine.step
    trained: list[float] = []

    def killed(self: Engine, lr: float, decay: float, numbers: Sequence[float]) -> tuple[float, bool]:
        trained.append(lr)
        if len(trained) == 9:
            raise KeyboardInterrupt
        return original(self, lr, decay, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_small()
    assert train_small() == 0
    spent = read_time(tmp_path / "run")
    assert spent is not None
    assert spent.starts == 2
    assert {"start", "steps", "data", "repeated", "evaluation", "checkpoints", "between"} <= spent.seconds.keys()
    first, second = time_log.records_of(time_log.read_lines(tmp_path / "run" / "logs" / time_log.FILE))
    assert (first.step, first.trained, second.resumed, second.step, second.trained) == (8, 8, 5, 20, 15)
    for record in (first, second):
        assert sum(record.seconds.values()) == pytest.approx(record.ended - record.began)
    # The report is printed before the last record is written, so its shares are those of a slightly shorter time.
    said = capsys.readouterr().out
    assert re.search(r"in 2 starts: \d+\.\d% \w+, \d+\.\d% \w+", said)
    assert status.main([str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"in 2 starts: {spent.words()}" in said
    assert "is best" in said


def test_the_interval_between_checkpoints_follows_from_measured_times() -> None:
    """Daly's interval for the devices that are asked for, or else those of the last start."""
    spent = time_log.TimeSpent(starts=2, save_s=10.0, processes=1, seconds={"start": 120.0, "steps": 1000.0})
    alone = spent.interval()
    assert alone is not None
    assert "stops training for 10.0 s, a start takes 60 s" in alone
    assert "on 1 device," in alone
    many = spent.interval(512)
    assert many is not None
    assert "one in 99 h on 512 devices, a checkpoint every 0:44:23 is best and 0.76% of the time is lost" in many
    assert time_log.TimeSpent(1, None, 1, {"start": 1.0}).interval() is None
