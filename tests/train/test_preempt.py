"""Requests to stop: signals at any time, a time budget, a launcher that died."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hybridtron.checkpoint.save import SaveError, Saver
from hybridtron.config.schema import RunConfig
from hybridtron.engine.engine import Engine
from hybridtron.train import held_out_loss, launcher
from hybridtron.train.preempt import StopRequests
from hybridtron.train.trainer import Trainer
from tests.slow import slow_except
from tests.train.conftest import Train
from tests.train.faults import ending_of, happening, outcome_of, trained


def agreed(asked: StopRequests) -> str | None:
    """Return the reason to stop for a single process."""
    return asked.agreed(asked.flags())


def requests(environment: dict[str, str] | None = None, max_minutes: float | None = None) -> StopRequests:
    return StopRequests(RunConfig(name="test", max_minutes=max_minutes), False, environment or {})


def test_a_signal_saves_a_checkpoint_from_which_the_run_resumes(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    ten = "run.max_steps=10"
    assert train_small(f"run.dir={tmp_path / 'whole'}", ten) == 0
    with happening("SIGINT", Engine, "forward_backward", 7):
        assert train_small(ten) == 75
    assert ending_of(run) == {"outcome": "preempted", "step": 7, "reason": "SIGINT"}
    assert (run / "checkpoints" / "step-00000007").is_dir()
    assert "preempted at step 7" in capsys.readouterr().err
    assert train_small(ten) == 0
    assert trained(run) == trained(tmp_path / "whole")


@pytest.mark.parametrize("where", slow_except(["save", "evaluate"], "save"))
def test_signals_during_saving_or_evaluation_wait_for_the_next_step(
    where: str, train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Trainer if where == "save" else held_out_loss
    original = getattr(owner, where)

    def signalled(*arguments: object) -> object:
        signal.raise_signal(signal.SIGTERM)  # not os.kill: two signals to a process may be seen in either order
        signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(owner, where, signalled)
    assert train_small("run.eval_every=7") == 75
    assert ending_of(tmp_path / "run") == {
        "outcome": "preempted",
        "step": 6 if where == "save" else 8,
        "reason": "SIGTERM",
    }


def test_a_signal_in_the_last_step_lets_the_run_finish(train_small: Train, tmp_path: Path) -> None:
    with happening("SIGTERM", Engine, "forward_backward", 3):
        assert train_small("run.max_steps=3") == 0
    assert ending_of(tmp_path / "run") == {"outcome": "finished", "step": 3}


def test_a_stop_without_a_checkpoint_is_a_failure(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Saver, "_write", full)
    with pytest.raises(SaveError):
        train_small("run.max_minutes=1e-4")
    assert outcome_of(tmp_path / "run")["outcome"] == "failed"


def test_a_time_budget_ends_the_run_by_itself(train_small: Train, tmp_path: Path) -> None:
    assert train_small("run.max_minutes=1e-4") == 75
    assert ending_of(tmp_path / "run") == {"outcome": "preempted", "step": 1, "reason": "the time is up"}


def test_a_second_signal_is_reported_and_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests(RunConfig(name="test"), is_main=True, environment={}) as asked:
        assert agreed(asked) is None
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert agreed(asked) == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err.splitlines() == [
        "SIGUSR1: the run saves and stops after this step, or after the next one",
        "SIGTERM: the run is already stopping",
        "SIGINT: the run is already stopping",
    ]


def test_ranks_stop_for_a_request_of_any_rank() -> None:
    reasons = ("SIGTERM", "SIGINT", "SIGUSR1", "the time is up", "its launcher is gone")
    for number, reason in enumerate(reasons):
        sums = [0.0] * len(reasons)
        sums[number] = 3.0
        assert StopRequests.agreed(sums) == reason
    assert StopRequests.agreed([0.0, 2.0, 0.0, 1.0, 0.0]) == "SIGINT"
    assert StopRequests.agreed([0.0] * len(reasons)) is None


def test_time_for_a_checkpoint_and_three_steps_is_kept_back() -> None:
    asked = requests(max_minutes=1.0)
    assert asked.reserve == 0
    asked.longest_save = 30.0
    asked.longest_step = 9.0
    assert asked.reserve == 57
    assert agreed(asked) is None
    asked.longest_step = 16.0
    assert agreed(asked) == "the time is up"


def test_slurm_ends_a_job_at_a_known_time() -> None:
    assert agreed(requests({"SLURM_JOB_END_TIME": str(int(time.time() + 900))})) is None
    assert agreed(requests({"SLURM_JOB_END_TIME": str(int(time.time() + 50))})) == "the time is up"
    both = requests({"SLURM_JOB_END_TIME": str(int(time.time() + 9000))}, max_minutes=0.5)
    assert agreed(both) == "the time is up"


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_deadlines_do_not_follow_a_jumping_clock(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    asked = requests({"SLURM_JOB_END_TIME": str(int(now + 900))}, max_minutes=10.0)
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert agreed(asked) is None


def test_only_launched_processes_stop_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.getpid()
    monkeypatch.setattr(launcher, "PARENT", python)
    monkeypatch.setattr(os, "getppid", lambda: python)
    launched = requests({"TORCHELASTIC_RUN_ID": "x"})
    by_hand = requests()
    assert agreed(launched) is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert agreed(launched) == "its launcher is gone"
    assert agreed(by_hand) is None


@pytest.mark.parametrize("stepped", [False, True])
def test_a_process_without_its_launcher_ends(
    stepped: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before its first step it ends at once; later it may save first, but not forever."""
    ended = threading.Event()
    waited: list[float] = []
    monkeypatch.setattr(launcher, "PARENT", -1)
    monkeypatch.setattr(launcher.time, "sleep", waited.append)
    monkeypatch.setattr(launcher.os, "_exit", lambda _: ended.set())
    orphan = launcher.Launcher({"TORCHELASTIC_RUN_ID": "x"})
    orphan.worth_saving = stepped
    orphan.watch()
    assert ended.wait(30)
    assert waited == [launcher.GRACE_S] * stepped
    assert "launcher is gone" in capfd.readouterr().err


def test_a_launcher_that_died_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have been adopted already, by a program that is not below a Python program."""
    with subprocess.Popen(["sleep", "100"]) as adopter:
        monkeypatch.setattr(launcher, "PARENT", adopter.pid)
        monkeypatch.setattr(launcher, "_parent_of", lambda process: 1)
        monkeypatch.setattr(os, "getppid", lambda: adopter.pid)
        are_gone = [launcher.Launcher(environment).is_gone for environment in ({"TORCHELASTIC_RUN_ID": "x"}, {})]
        adopter.kill()
    assert are_gone == [True, False]


def test_a_parent_of_another_user_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most users can't read the first process's program."""

    def refuse(_: Path) -> Path:
        raise PermissionError

    monkeypatch.setattr(launcher, "PARENT", 1)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(Path, "readlink", refuse)
    assert launcher.Launcher({"TORCHELASTIC_RUN_ID": "x"}).is_gone


def test_a_run_is_worth_saving_after_its_first_step() -> None:
    asked = requests()
    assert not asked.launcher.worth_saving
    agreed(asked)
    assert asked.launcher.worth_saving
