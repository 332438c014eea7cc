"""A run under a few random faults ends as one without; where it would not, the program says so."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.proving.chaos import main as chaos
from hybridtron.proving.chaos.fault_run import FaultRun, FaultRunFailed
from hybridtron.proving.chaos.faults import KINDS, Disk, FaultContext, deleted, flipped, inject_fault, truncated
from hybridtron.proving.chaos.training_run import ProcessStart, Run, arguments_of

COMMAND = [sys.executable, "-m", "hybridtron", "chaos"]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "steps", "mean", "seed"), [("dp2", "60", "8", "3"), ("ep2", "30", "6", "37")])
def test_run_under_faults_ends_as_an_undisturbed_run(
    layout: str, steps: str, mean: str, seed: str, tmp_path: Path
) -> None:
    page = tmp_path / "chaos.md"
    options = ["--steps", steps, "--mean", mean, "--seed", seed, "--layout", layout, "--page", str(page)]
    done = subprocess.run([*COMMAND, *options], cwd=tmp_path, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
    assert page.read_text().count("\n| ") >= 4  # header, and at least three faults


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_that_ends_with_other_weights_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with a run from other random weights."""
    seeds = iter((1, 2, 2))

    def with_other_seeds(data: Path, steps: int, layout: str) -> tuple[str, ...]:
        return (*arguments_of(data, steps, layout), f"run.seed={next(seeds)}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos, "arguments_of", with_other_seeds)
    assert chaos.main(["--steps", "8", "--mean", "1000", "--seed", "3"]) == 1
    reported = capsys.readouterr().out
    assert "NOT THE SAME" in reported
    assert "step 1: " in reported
    assert "config.yaml" in reported
    assert list((tmp_path / "runs/chaos").iterdir())  # stays, to be looked at


def run_of(home: Path, *losses: float) -> Run:
    run = Run(home, (), len(losses))
    run.folder.mkdir(parents=True)
    write(run, *losses)
    return run


def write(run: Run, *losses: float) -> None:
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, start=1)]
    (run.folder / "metrics.jsonl").write_text("".join(lines))


def test_steps_after_a_restart_are_distinguished_from_earlier_ones(tmp_path: Path) -> None:
    started = object.__new__(ProcessStart)
    started.run = run_of(tmp_path, 5.0, 4.0, 3.0)
    started.before = started.run.lines()
    assert started.new_lines() == []  # not cut back yet
    write(started.run, 5.0, 4.0)
    assert started.new_lines() == []
    write(started.run, 5.0, 4.0, 3.1, 2.0)
    assert [json.loads(line)["step"] for line in started.new_lines()] == [3, 4]


def test_damage_changes_the_stored_bytes() -> None:
    draw = random.Random(0)
    stored = b"some bytes"
    assert len(flipped(bytearray(stored), draw)) == len(stored)
    assert flipped(bytearray(stored), draw) != stored
    assert stored.startswith(truncated(bytearray(stored), draw))
    assert len(truncated(bytearray(stored), draw)) < len(stored)
    assert deleted(bytearray(stored), draw) is None


def test_every_kind_of_fault_occurs_before_any_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        monkeypatch.setitem(KINDS, kind, lambda context, kind=kind: kind)
    monkeypatch.setitem(KINDS, "flip a bit", lambda context: None)  # impossible here
    left: list[str] = []
    context = FaultContext(object.__new__(ProcessStart), Disk(run_of(tmp_path)), random.Random(0))
    injected = [inject_fault(context, left) for _ in range(len(KINDS) - 1)]
    assert {fault[0] for fault in injected if fault} == KINDS.keys() - {"flip a bit"}
    assert inject_fault(context, left) is not None  # only the one that is impossible was left, and all begin again


def test_wrong_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main(["--steps", "0"])
    assert ended.value.code == 2
    assert "--steps" in capsys.readouterr().err


def test_failed_run_is_not_reported_as_unequal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stall(fault_run: FaultRun, progress: object) -> None:
        raise FaultRunFailed(f"{fault_run.run.home} has trained no step for 60 s")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos, "write_data", lambda folder: folder.mkdir(parents=True))
    monkeypatch.setattr(FaultRun, "survive", stall)
    assert chaos.main(["--steps", "8", "--seed", "3"]) == 1
    reported = capsys.readouterr().out
    assert "A RUN FAILED" in reported
    assert "has trained no step for 60 s" in reported
    assert "NOT THE SAME" not in reported
