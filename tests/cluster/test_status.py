"""The status of runs, from folders as runs and jobs leave them, with and without a queue."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from hybridtron.cluster import attempt_log, status
from hybridtron.cluster.attempt_log import Attempt
from hybridtron.config.load import load, to_yaml
from tests.refusals import refusal
from tests.train.conftest import small_run_arguments

STARTED = Attempt("7", 0, ("n1", "n2"), began=0.0, step_before=0)


@pytest.fixture(scope="module")
def configuration() -> str:
    """Return the configuration of a run with 100 steps of 64 tokens each."""
    return to_yaml(load([*small_run_arguments(Path("data"), Path("run")), "phases.0.tokens=6400"]))


@pytest.fixture
def run(configuration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder after 30 steps, of which the eleventh, the first after a start, took long; no SLURM is here."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    folder = tmp_path / "run"
    (folder / "slurm").mkdir(parents=True)
    (folder / "config.yaml").write_text(configuration)
    times = [0.5] * 30
    times[10] = 50.0
    lines = [
        {"step": step, "phase": "pretrain", "loss": 7 - step / 10, "step_time": took, "tokens_per_second": 64 / took}
        for step, took in enumerate(times, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 31, "cut')
    return folder


def submitted(run: Path, queue: str, error: str | None = None, jobs: Sequence[str] = ("7",)) -> None:
    (run / "slurm" / "submission.json").write_text(json.dumps({"jobs": jobs, "error": error}))
    program = run.parent / "bin" / "squeue"
    program.write_text(f"#!/bin/bash\nprintf '{queue}'\n")
    program.chmod(0o755)


def test_status_has_step_speed_and_remaining_time(run: Path) -> None:
    run_status = status.status(run)
    assert (run_status.state, run_status.phase, run_status.step, run_status.tokens_per_second) == (
        "running",
        "pretrain",
        30,
        128.0,
    )
    assert run_status.left_s == 70 * 64 / 128


def test_status_shows_running_and_waiting_jobs(run: Path) -> None:
    attempt_log.record(run, replace(STARTED, outcome="preempted", decision="again", why="asked to"))
    attempt_log.record(run, replace(STARTED, restart=1))
    submitted(run, "7|RUNNING|None|n[1-2]|2026-01-01T00:00:00\\n9|RUNNING|None|n3|x\\n")
    run_status = status.status(run)
    assert (run_status.state, run_status.why, len(run_status.attempts)) == ("running", "on n[1-2]", 2)
    submitted(run, "7|PENDING|Resources||2026-01-01T00:00:00\\n")
    run_status = status.status(run)
    assert run_status.state == "queued"
    assert run_status.why == "job 7 waits (Resources), expected start 2026-01-01T00:00:00"


@pytest.mark.parametrize(
    ("queue", "state", "why"),
    [
        ("7|CONFIGURING|None|n[1-2]|x\\n", "starting", "job 7 is configuring on n[1-2]"),
        ("7|SUSPENDED|None|n1|x\\n", "suspended", "job 7 is suspended on n1"),
        ("7|COMPLETING|None|n1|x\\n", "ending", "job 7 is completing on n1"),
        ("8|PENDING|Dependency||x\\n7|COMPLETING|None|n1|x\\n", "ending", "job 7 is completing on n1"),
        ("8|COMPLETING|None|n3|x\\n7|RUNNING|None|n1|x\\n", "running", "on n1"),
        ("7|STAGE_OUT|None|n1|x\\n", "ending", "job 7 is stage out on n1"),
        ("7|REQUEUED|BeginTime||x\\n", "queued", "job 7 waits (BeginTime), expected start x"),
        (
            "7|REQUEUE_HOLD|JobHeldUser||x\\n",
            "held",
            "job 7 is held (JobHeldUser): release the job with scontrol release 7",
        ),
        ("7|POWER_UP_NODE|None|n1|x\\n", "power up node", "job 7 is power up node on n1"),
    ],
)
def test_status_shows_other_states_of_jobs(queue: str, state: str, why: str, run: Path) -> None:
    submitted(run, queue, jobs=["7", "8"])
    run_status = status.status(run)
    assert (run_status.state, run_status.why) == (state, why)


@pytest.mark.parametrize(
    ("outcome", "decision", "state", "why"),
    [
        ({"outcome": "finished"}, "done", "finished", ""),
        ({"outcome": "finished", "step": 40, "loss": 2.5, "seconds": 9.5, "ended": "2026"}, "done", "finished", ""),
        ({"outcome": "preempted", "step": 30, "reason": "SIGUSR1"}, "again", "preempted", "SIGUSR1"),
        ({"outcome": "failed", "rank": 3, "reason": "out of memory"}, "again", "failed", "rank 3: out of memory"),
        ({"outcome": "failed", "rank": 3, "reason": "out of memory"}, "stop", "stopped", "mend it"),
    ],
)
def test_status_shows_the_end_of_a_run(outcome: dict, decision: str, state: str, why: str, run: Path) -> None:
    (run / "outcome.json").write_text(json.dumps(outcome))
    attempt_log.record(run, replace(STARTED, decision=decision, why="mend it"))
    submitted(run, "")
    run_status = status.status(run)
    assert (run_status.state, run_status.why) == (state, why)
    assert (run_status.left_s is None) == (state == "finished")


def test_status_shows_refused_and_silent_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_written = (run / "metrics.jsonl").stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: last_written + 3 * 3600 + 0.5)
    run_status = status.status(run)
    assert (run_status.state, run_status.why) == ("silent", "the last step was 3:00:00 ago")
    submitted(run, "", error="sbatch failed: no")
    assert (status.status(run).state, status.status(run).why) == ("not submitted", "sbatch failed: no")


def test_folders_without_a_run_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", str(run)]) == 0
    reported = " ".join(capsys.readouterr().out.split())
    assert "running pretrain 30/100 128 4.0000 0:00:35" in reported
    for folder in (run / "none", run / "config.yaml"):
        error = refusal(status.main, [run, folder])
        assert error.code == "no-file"
        assert str(folder) in str(error)
    assert refusal(status.main, [run.parent]).code == "no-file"
    monkeypatch.chdir(run)
    assert refusal(status.main, []).code == "no-file"
    (run / "config.yaml").write_text("other: 1\n")
    assert refusal(status.main, [run]).code == "unreadable"


def test_status_names_slow_ranks_by_host(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:30]]
    lines[-1]["slow_ranks"] = {"n7 rank 61": 0.21}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["status", str(run)]) == 0
    assert f"{run}: at step 30 n7 rank 61 is 21% slower than its peers" in capsys.readouterr().out
    lines[-1].pop("slow_ranks")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    main(["status", str(run)])
    assert "slower" not in capsys.readouterr().out
