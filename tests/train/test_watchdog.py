"""The watchdog of one process, and the choice of the rank that is named as the first to fail."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hybridtron.problems import ConfigError, Problem
from hybridtron.train import outcome, watchdog
from hybridtron.train.collectives import Divergence
from hybridtron.train.outcome import FailedElsewhere, Failures, Preempted, process_fault, record_unfinished
from hybridtron.train.supervisor.sections import Section, SectionPipe
from hybridtron.train.watchdog import Watchdog
from tests.refusals import raises_code
from tests.train.faults import ending_of, outcome_of


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "3600"])
    yield process
    process.kill()
    process.wait()


class Clock:
    """Stand-in for `time` whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(watchdog, "time", stand_in)
    return stand_in


def test_progress_keeps_the_watchdog_quiet(tmp_path: Path, clock: Clock) -> None:
    with Watchdog(Failures(tmp_path, 0), 600.0, SectionPipe({})) as watched:
        for _ in range(6):
            watched.beat("a step", Section.step)
            clock.now += 590.0
            assert watched.overdue() is None
        clock.now += 20.0
        assert watched.overdue() == "a step did not end within 600 s (run.timeout)"
        watched.beat("the next step", Section.step)
    assert not list((tmp_path / "logs").iterdir())
    assert not (tmp_path / "outcome.json").exists()


def test_a_hanging_process_is_dumped_recorded_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    ended: list[int] = []
    watched = Watchdog(Failures(tmp_path, 3), 600.0, SectionPipe({}))

    def end(code: int) -> None:
        ended.append(code)
        watched._ended.set()

    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 600.0)
    with watched:
        watched.beat("the first step", Section.start, at_least_s=900.0)
        clock.now += 899.0
        assert watched.overdue() is None
        clock.now += 2.0
        assert watched._ended.wait(120)
    assert ended == [1]
    outcome = outcome_of(tmp_path)
    assert (outcome["outcome"], outcome["rank"]) == ("failed", 3)
    assert "the first step did not end within 900 s (run.timeout)" in outcome["reason"]
    stacks = (tmp_path / "logs" / "stacks-3.txt").read_text()
    assert "test_a_hanging_process" in stacks
    assert "the first step did not end" in stacks


@pytest.mark.parametrize("first", [2, 3])
def test_collectives_are_compared_last_and_by_the_first_rank_alone(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = connected(tmp_path, 3)
    if first == 2:
        connected(tmp_path, 2).record("failed", "a bad disk", 2)
    order: list[str] = []

    def end(_: int) -> None:
        order.append("exit")

    def compare(logs: Path, since: float) -> Divergence:
        order.append("compare")
        return Divergence(1, "rank 1 waits for nobody")

    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 600.0)
    monkeypatch.setattr(watchdog, "_end_all", lambda _: order.append("end workers"))
    monkeypatch.setattr(watchdog, "compare_at_hang", compare)
    with Watchdog(failures, 600.0, SectionPipe({})) as watched:
        watched._end("the first step did not end")
    said = capfd.readouterr().err
    assert f"stacks: {watched.path}\n" in said
    if first == 2:
        assert order == ["end workers", "exit"]
    else:
        assert order == ["end workers", "compare", "exit"]
        assert said.endswith("rank 3: collectives: rank 1 waits for nobody\n")
        assert watchdog.FILES_S <= clock.now < watchdog.FILES_S + 1  # no other rank has written


def test_comparison_waits_for_the_files_of_this_start(tmp_path: Path) -> None:
    failures = connected(tmp_path, 0)
    failures.started = 1000.0
    watched = Watchdog(failures, 600.0, SectionPipe({}))
    (tmp_path / "logs").mkdir()
    paths = [tmp_path / "logs" / f"collectives-{rank}.json" for rank in range(4)]
    for path in paths:
        assert not watched._all_have_written()
        path.touch()
    assert watched._all_have_written()
    os.utime(paths[2], (999.0, 999.0))
    assert not watched._all_have_written()


def test_two_threads_do_not_write_collectives_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []

    def write(logs: Path, rank: int, recorded: Mapping[str, Any], waits: bool) -> None:
        inside.append(1)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()

    recorded = {"groups": {"all": [0, 1]}, "calls": [], "lost": False}
    monkeypatch.setattr(watchdog, "recorded_calls", lambda: dict(recorded))
    monkeypatch.setattr(watchdog, "write_calls", write)
    watched = Watchdog(connected(tmp_path, 0), 600.0, SectionPipe({}))
    threads = [threading.Thread(target=watched._write_calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def connected(run: Path, rank: int) -> Failures:
    """Return one of four connected ranks."""
    failures = Failures(run, rank)
    failures.processes = [(other, 1) for other in range(4)]
    return failures


def test_a_new_start_replaces_an_earlier_record(tmp_path: Path) -> None:
    connected(tmp_path, 0).record("finished")
    assert Failures(tmp_path, 0).report("no other rank came", waiting=False) == (0, "no other rank came")
    assert outcome_of(tmp_path)["outcome"] == "failed"


def test_progress_before_a_hang_is_recorded_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration is not affected by jumps of the clock."""
    failures = connected(tmp_path, 0)
    failures.progress.step = 5
    failures.progress.loss = math.nan
    failures.progress.validation = {"1x": 2.5, "2x": math.inf}
    for step, files in ((10, ["manifest.json"]), (20, ["manifest.json"]), (30, [])):  # the last was never sealed
        (tmp_path / f"checkpoints/step-{step:08}").mkdir(parents=True)
        for name in files:
            (tmp_path / f"checkpoints/step-{step:08}" / name).touch()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert failures.record("finished")
    outcome = outcome_of(tmp_path)
    assert "NaN" not in (tmp_path / "outcome.json").read_text()
    assert 0 <= outcome.pop("seconds") < 3600
    assert datetime.fromisoformat(outcome.pop("ended")).tzinfo is not None
    assert outcome == {
        "outcome": "finished", "step": 5, "loss": None, "validation": {"1x": 2.5, "2x": None},
        "checkpoint": str(tmp_path / "checkpoints/step-00000020"),
    }  # fmt: skip


def test_a_watchdog_ends_without_its_file(tmp_path: Path) -> None:
    with Watchdog(Failures(tmp_path, 0), 60.0, SectionPipe({})) as watched:
        watched.path.unlink()
    assert not watched.path.exists()


def test_the_first_recorded_failure_is_kept(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert connected(tmp_path, 2).record("failed", "a bad disk", 2)
    assert not connected(tmp_path, 0).record("finished")
    elsewhere = connected(tmp_path, 0).record_error(RuntimeError("connection closed by peer"))
    assert isinstance(elsewhere, FailedElsewhere)
    assert str(elsewhere) == "rank 0 ends because rank 2 failed first: a bad disk"
    assert "connection closed by peer" in (tmp_path / "logs" / "error-0.txt").read_text()


def test_stopped_and_killed_ranks_are_named(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    assert process_fault(sleeper.pid) is None
    sleeper.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 120
    while process_fault(sleeper.pid) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert process_fault(sleeper.pid) == "is stopped (SIGSTOP)"
    sleeper.kill()
    sleeper.wait()
    assert "is gone" in str(process_fault(sleeper.pid))
    informed = Failures(tmp_path, 0)
    informed.processes = [(0, os.getpid()), (1, sleeper.pid), (0, sleeper.pid)]
    rank, reason = informed.report("RuntimeError: connection closed by peer", waiting=True)
    assert rank == outcome_of(tmp_path)["rank"] == 2
    assert reason.startswith("rank 2 is gone: it was killed or crashed; rank 0 observed: RuntimeError")


def test_waiting_ranks_let_others_report_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "GRACE_S", 120.0)
    informed = Failures(tmp_path, 0)
    other = Failures(tmp_path, 1)
    for process_failures in (informed, other):
        process_failures.processes = [(0, os.getpid())] * 2
    threading.Timer(0.2, other.report, ("a bad disk", False)).start()
    assert informed.report("connection closed by peer", waiting=True) == (1, "a bad disk")


def test_outcomes_are_recorded_by_their_exceptions(tmp_path: Path) -> None:
    for rank, name in ((0, "a"), (1, "b")):
        (tmp_path / name).mkdir()
        failures = connected(tmp_path / name, rank)
        failures.progress.step = 7
        with pytest.raises(Preempted), record_unfinished(failures):
            raise Preempted(7, "SIGTERM")
    assert ending_of(tmp_path / "a") == {"outcome": "preempted", "step": 7, "reason": "SIGTERM"}
    assert not (tmp_path / "b" / "outcome.json").exists()
    for rank in (1, 0):
        with raises_code(ConfigError, "out-of-range"), record_unfinished(connected(tmp_path / "b", rank)):
            raise ConfigError([Problem("seq_len", "out-of-range", "is wrong")])
    assert outcome_of(tmp_path / "b")["rank"] == 1
