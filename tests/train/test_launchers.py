"""Real processes: train.py and torchrun, of which a single process is asked to stop or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.train.conftest import small_run_arguments
from tests.train.faults import outcome_of, trained

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LONG = "phases.0.tokens=2M"  # far more than is read before the signal comes

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own group; at the end the full group is killed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.1)


def wait_for_outcome(run: Path) -> dict[str, object]:
    until = time.monotonic() + 120
    while True:
        with suppress(FileNotFoundError, json.JSONDecodeError):  # it may be there before its words are
            return outcome_of(run)
        assert time.monotonic() < until
        time.sleep(0.1)


def descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children] + [deeper for child in children for deeper in descendants(int(child))]


@pytest.mark.parametrize(
    ("options", "number", "reason"),
    [
        ([], signal.SIGTERM, "SIGTERM"),
        ([], signal.SIGINT, "SIGINT"),
        ([], signal.SIGUSR1, "its launcher is gone"),
        (["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"], signal.SIGUSR1, "SIGUSR1"),
        ([], signal.SIGKILL, "its launcher is gone"),
    ],
)
def test_a_signal_to_torchrun_preempts_the_run(
    options: list[str], number: signal.Signals, reason: str, counting_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*small_run_arguments(counting_folder, run), LONG]
    with started([*TORCHRUN, *options, "train.py", *arguments]) as launcher:
        wait_until_step(run, 3, launcher)
        launcher.send_signal(number)
        assert launcher.wait(120) != 0
        outcome = wait_for_outcome(run)
    assert outcome["outcome"] == "preempted"
    assert outcome["reason"] == reason
    steps = [line["step"] for line in trained(run)]
    assert steps == list(range(1, outcome["step"] + 1))
    assert (run / "checkpoints" / f"step-{outcome['step']:08}").is_dir()


@pytest.mark.parametrize("steps", [0, 3], ids=["starting", "training"])
def test_a_killed_torchrun_can_be_started_again_at_once(steps: int, counting_folder: Path, tmp_path: Path) -> None:
    """The killed launcher's processes live on for a while; no line of the metrics is lost or written twice."""
    run = tmp_path / "run"
    arguments = [*small_run_arguments(counting_folder, run), "run.eval_every=20"]
    with started([*TORCHRUN, "train.py", *arguments]) as launcher:
        until = time.monotonic() + 120
        while not (run / ".lock").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        if steps:
            wait_until_step(run, steps, launcher)
        orphans = descendants(launcher.pid)
        launcher.kill()
        launcher.wait()
        with started([*TORCHRUN, "train.py", *arguments]) as again:
            assert again.wait(250) == 0, again.stderr and again.stderr.read()
    assert outcome_of(run)["outcome"] == "finished"
    assert [line["step"] for line in trained(run)] == list(range(1, 21))
    until = time.monotonic() + 60  # those that have made a step may take half a minute to save
    while any(Path(f"/proc/{orphan}").exists() for orphan in orphans):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_the_second_of_two_starts_is_refused(counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "train.py", *small_run_arguments(counting_folder, run), LONG]
    with started(command) as first, started(command) as second:
        until = time.monotonic() + 200
        while (first.poll(), second.poll()) == (None, None):
            assert time.monotonic() < until
            time.sleep(0.1)
        if first.poll() is not None:
            refused = first
            holder = second
        else:
            refused = second
            holder = first
        assert refused.returncode == 2
        assert refused.stderr is not None
        assert f"process {holder.pid} " in refused.stderr.read()
        wait_until_step(run, 3, holder)
        holder.terminate()
        assert holder.wait(120) == 75
    assert [line["step"] for line in trained(run)] == list(range(1, len(trained(run)) + 1))


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_loader_workers_ignore_signals_and_end_with_their_process(
    ending: signal.Signals, code: int, counting_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*small_run_arguments(counting_folder, run), LONG, "data.workers=1"]
    with started([sys.executable, "train.py", *arguments]) as process:
        wait_until_step(run, 3, process)
        family = [process.pid, *descendants(process.pid)]
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            for member in family[1:]:
                os.kill(member, number)
        wait_until_step(run, len(trained(run)) + 20, process)
        os.kill(process.pid, ending)
        assert process.wait(120) == code
        until = time.monotonic() + 120
        while any(Path(f"/proc/{member}").exists() for member in family[1:]) and time.monotonic() < until:
            time.sleep(0.2)
        assert not [member for member in family[1:] if Path(f"/proc/{member}").exists()]
    assert len(family) >= 3  # itself, the fork server, the worker


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "exited unexpectedly"), (signal.SIGSTOP, "did not end within 40 s")],
)
def test_a_dead_or_stopped_loader_worker_fails_the_run(
    number: signal.Signals, reason: str, counting_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*small_run_arguments(counting_folder, run), LONG, "data.workers=1", "run.timeout=40"]
    with started([sys.executable, "train.py", *arguments]) as process:
        wait_until_step(run, 3, process)
        os.kill(descendants(process.pid)[-1], number)
        assert process.wait(200) == 1
    assert outcome_of(run)["outcome"] == "failed"
    assert reason in outcome_of(run)["reason"]
    assert "loader.py" in "".join(path.read_text() for path in (run / "logs").glob("*-0.txt"))
