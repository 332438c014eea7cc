"""Runs side by side: in order, resumed, failed, interrupted; with a program in place of training, and for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridtron.cli import sweep as command
from hybridtron.problems import Unusable
from hybridtron.sweep import carry_out as carried
from tests.train.conftest import counting_folder as counting_folder  # the fixture
from tests.train.conftest import small_run_arguments

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, pathlib, sys, time
settings = dict(text.split("=", 1) for text in sys.argv[1:])
run = pathlib.Path(settings["run.dir"])
run.mkdir(parents=True, exist_ok=True)
with (run.parent / "order.txt").open("a") as file:
    file.write(run.name + "\\n")
seed = int(settings["run.seed"])
if "run.weights" in settings:
    assert (pathlib.Path(settings["run.weights"]) / "outcome.json").exists()
if settings.get("optim.clip") == "7" and not (run / "failed").exists():
    (run / "failed").touch()
    sys.exit("out of luck")
line = {"step": 20, "loss": 1.0 + seed, "validation": {"1x": 2.0 * seed}}
(run / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
(run / "outcome.json").write_text('{"outcome": "finished"}')
"""
"""A training program; the first try of a run with optim.clip=7 fails."""

FILE = """
settings: [recipe=laptop]
variants: {base: [], longer: {from: base, settings: [optim.clip=2.0]}}
grid: {optim.weight_decay: [0.1, 0.2], run.seed: [0, 1]}
metrics: [loss, validation/1x]
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command on a file, with the program above for training."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(carried, "TRAIN", (sys.executable, "-S", str(tmp_path / "program.py")))
    monkeypatch.setattr(carried, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(command, "steps_of", lambda sweep, folder: {run.name: 20 for run in sweep.runs})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(text: str, *arguments: str) -> int:
        (tmp_path / "decay.yaml").write_text(text)
        return command.main([str(tmp_path / "decay.yaml"), "--output", str(tmp_path / "out"), *arguments])

    return run


def order(tmp_path: Path) -> list[str]:
    return (tmp_path / "out" / "order.txt").read_text().split()


def test_table_has_means_over_seeds(sweep: Callable[..., int], tmp_path: Path) -> None:
    assert sweep(FILE) == 0
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert table[2] == "| variant | optim.weight_decay | n | loss | validation/1x |"
    assert table[4] == "| base | 0.1 | 2 | 1.5 ± 0.5 | 1 ± 1 |"  # of 1 and 2, and of 0 and 2
    assert len(table[4:]) == 4 + 2
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 8
    assert runs[1] == {
        "run": "base-weight_decay=0.1-seed=1", "variant": "base", "optim.weight_decay": "0.1", "run.seed": "1",
        "finished": True, "loss": 2.0, "validation/1x": 2.0,
    }  # fmt: skip
    assert (tmp_path / "out" / "picture.png").stat().st_size > 5000


def test_run_waits_for_the_run_that_it_starts_from(sweep: Callable[..., int], tmp_path: Path) -> None:
    assert sweep(FILE, "--jobs", "3") == 0  # the program asserts that the other has finished
    started = order(tmp_path)
    assert sorted(started) == sorted(set(started))
    starts = {name: name.replace("longer", "base") for name in started if name.startswith("longer")}
    assert len(starts) == 4
    assert all(started.index(name) > started.index(start) for name, start in starts.items())


def test_finished_runs_are_kept_when_the_sweep_grows(sweep: Callable[..., int], tmp_path: Path) -> None:
    assert sweep("settings: [recipe=laptop]\ngrid: {run.seed: [0, 1]}") == 0
    assert sweep("settings: [recipe=laptop]\ngrid: {run.seed: [0, 1, 2]}") == 0
    assert sorted(order(tmp_path)) == ["seed=0", "seed=1", "seed=2"]
    with pytest.raises(Unusable) as refused:
        sweep("settings: [recipe=laptop, optim.clip=3]\ngrid: {run.seed: [0, 1]}")
    assert refused.value.code == "changed"


def test_failed_run_is_reported_and_tried_again(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = FILE.replace("base: []", "base: [optim.clip=7]")
    assert sweep(text) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED") == 8  # and those that start from them
    assert "out of luck" in said
    assert not any(name.startswith("longer") for name in order(tmp_path))
    assert sweep(text) == 0


def test_option_plan_starts_nothing(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(FILE, "--plan") == 0
    assert "base-weight_decay=0.1-seed=0: at step 0 of 20" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_wrong_setting_is_refused_with_the_name_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("settings: [recipe=laptop]\ngrid: {optim.clp: [1, 2]}")
    with pytest.raises(Unusable, match="clp=1") as refused:
        command.main([str(tmp_path / "wrong.yaml"), "--output", str(tmp_path / "out")])
    assert refused.value.code == "unknown-name"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_runs_continue(tmp_path: Path, counting_folder: Path) -> None:
    """Real training: interrupted after its first steps, and carried on by the same command."""
    small = [text for text in small_run_arguments(counting_folder, tmp_path) if not text.startswith("run.dir=")]
    small[small.index("phases.0.tokens=1280")] = "phases.0.tokens=40K"
    (tmp_path / "seeds.yaml").write_text(json.dumps({"settings": small, "grid": {"run.seed": [0, 1]}}))
    out = tmp_path / "out"
    words = [sys.executable, "-m", "hybridtron", "sweep", str(tmp_path / "seeds.yaml"), "--output", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        metrics = [out / f"seed={seed}" / "metrics.jsonl" for seed in (0, 1)]
        while not all(path.exists() and path.stat().st_size > 2000 for path in metrics):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=100)
    assert process.returncode == command.INTERRUPTED, said
    assert [json.loads((out / f"seed={seed}/outcome.json").read_text())["outcome"] for seed in (0, 1)] == [
        "preempted"
    ] * 2
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [[json.loads(line)["step"] for line in path.read_text().splitlines()] for path in metrics]
    assert steps[0] == steps[1] == list(range(1, 626))
