"""Supervised launches with real processes: by torchrun, alone, asked to stop, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridtron.config.schema import RunConfig
from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.supervisor import Place, launch_problems
from tests.train.conftest import small_run_arguments
from tests.train.faults import outcome_of, trained
from tests.train.test_launchers import LONG, TORCHRUN, descendants, started, wait_for_outcome, wait_until_step

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(300)]
RESTARTS = "run.restarts=2"


def supervisors_of(torchrun: subprocess.Popen[str]) -> list[int]:
    return [int(child) for child in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]


def wait_until_gone(processes: list[int]) -> None:
    until = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_rank_that_was_killed_under_torchrun_starts_again(counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started([*TORCHRUN, "train.py", *small_run_arguments(counting_folder, run), RESTARTS]) as torchrun:
        wait_until_step(run, 3, torchrun)
        os.kill(descendants(supervisors_of(torchrun)[1])[0], signal.SIGKILL)
        assert torchrun.wait(200) == 0, torchrun.stderr and torchrun.stderr.read()
    assert outcome_of(run)["outcome"] == "finished"
    assert [line["step"] for line in trained(run)] == list(range(1, 21))
    (fault,) = faults.read(run)
    assert (fault.cause, fault.rank) == ("killed", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_a_supervisor_preempts_the_run(number: signal.Signals, counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "train.py", *small_run_arguments(counting_folder, run), LONG, RESTARTS]
    with started(command) as supervisor:
        wait_until_step(run, 3, supervisor)
        family = descendants(supervisor.pid)
        supervisor.send_signal(number)
        assert supervisor.wait(120) == 75
        wait_until_gone(family)
    outcome = outcome_of(run)
    assert (outcome["outcome"], outcome["reason"]) == ("preempted", number.name)
    assert (run / "checkpoints" / f"step-{outcome['step']:08}").is_dir()


def test_killed_supervisor_leaves_no_process(counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*small_run_arguments(counting_folder, run), LONG, RESTARTS, "data.workers=1"]
    with started([sys.executable, "train.py", *arguments]) as supervisor:
        wait_until_step(run, 3, supervisor)
        family = descendants(supervisor.pid)
        assert len(family) >= 3  # the rank, its fork server and its worker
        os.kill(family[0], signal.SIGSTOP)
        supervisor.kill()
        supervisor.wait()
        wait_until_gone(family)


def test_run_whose_torchrun_was_killed_saves_and_ends(counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started([*TORCHRUN, "train.py", *small_run_arguments(counting_folder, run), LONG, RESTARTS]) as torchrun:
        wait_until_step(run, 3, torchrun)
        family = descendants(torchrun.pid)
        torchrun.kill()
        torchrun.wait()
        outcome = wait_for_outcome(run)
        wait_until_gone(family)
    assert outcome["outcome"] == "preempted"
    assert (run / "checkpoints" / f"step-{outcome['step']:08}").is_dir()


@pytest.mark.parametrize(
    ("run", "variables", "tasks", "key"),
    [
        (RunConfig(name="a", restarts=1, resume="never"), {"MASTER_ADDR": "n1"}, 2, "run.restarts"),
        (RunConfig(name="a", restarts=1), {}, 2, "MASTER_ADDR"),
        (RunConfig(name="a", restarts=1), {}, 1, None),
    ],
    ids=["named start", "no address", "single process"],
)
def test_launches_that_can_not_start_again_are_refused(
    run: RunConfig, variables: dict[str, str], tasks: int, key: str | None
) -> None:
    problems = launch_problems(run, Place(0, tasks, 0, 0, "n1"), variables)
    assert [problem.key for problem in problems] == [key] * (key is not None)


def test_refused_configuration_ends_with_2_and_leaves_no_folder(counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*small_run_arguments(counting_folder, run), RESTARTS, "parallel.tensor=3"]
    with started([*TORCHRUN, "train.py", *arguments]) as torchrun:
        assert torchrun.wait(120) != 0
        assert torchrun.stderr is not None
        reported = torchrun.stderr.read()
    assert "parallel.tensor" in reported
    assert "FAULT" not in reported
    assert not run.exists()
