"""Results of a study, with a program in place of training: written run by run, and carried on on another machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridtron.sweep import carry_out
from hybridtron.sweep.grid import SweepRun
from studies import study
from studies.results import Part, Trained, TrainedPhase, portable
from studies.study import Measured, conduct, parse, selected

SHAPE = {
    "parameters": 7, "pattern": "M", "width": 4, "layers": {"M": {"kind": "mamba"}}, "source": "text", "seed": 1,
    "steps": 2,
}  # fmt: skip
PROGRAM = """
import pathlib, sys
given = dict(text.split("=", 1) for text in sys.argv[1:])
run = pathlib.Path(given["run.dir"])
if run.name == "longer-seed=2" and (run.parent / "fails").exists():
    sys.exit(1)
if "run.weights" in given:
    assert (pathlib.Path(given["run.weights"]) / "outcome.json").exists()
run.mkdir(parents=True)
(run / "metrics.jsonl").write_text('{"step": 1, "step_time": 30.0}\\n{"step": 2, "step_time": 60.0}\\n')
(run / "outcome.json").write_text('{"outcome": "finished"}')
"""
FILE = """
settings: [recipe=laptop]
variants: {base: [], longer: {from: base, settings: [optim.clip=2.0]}}
grid: {run.seed: [1, 2]}
"""


class Study:
    """A study of four runs; `folder` is that of one machine, and `kept` goes from one to the next."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.kept = tmp_path / "kept"
        self.measured: list[str] = []
        self.notes: list[str] = []
        self.found: dict[str, Any] = {}
        (tmp_path / "study.yaml").write_text(FILE)

    def __call__(self, machine: str, *options: str, rows: int = 3) -> int:
        folder = self.tmp_path / machine
        folder.mkdir(exist_ok=True)
        where = ["--runs", str(folder), "--output", str(self.tmp_path / "out"), "--results", str(self.kept)]
        self.measured = []
        self.notes = []
        self.found = {}

        def planned() -> study.Plan:
            more = (f"data.path={folder / 'rows'}",)
            sweep, runs = selected(self.tmp_path / "study.yaml", folder, lambda _: more)
            return {"text": Part(sweep, runs, self.measure, {"rows": rows})}

        return conduct(parse("A study.", "study", [*where, "--jobs", "1", *options]), planned, self.write)

    def measure(self, run: SweepRun, path: Path) -> dict[str, Any]:
        assert path.name == run.name
        self.measured.append(run.name)
        return {"of": run.name}

    def write(self, measured: Measured, notes: list[str], output: Path) -> None:
        self.notes = notes
        self.found = {run.name: result for run, result in measured["text"]}

    def trained_at(self, machine: str) -> set[str]:
        return {path.parent.name for path in (self.tmp_path / machine).glob("*/outcome.json")}


@pytest.fixture
def small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(carry_out, "TRAIN", (sys.executable, "-S", str(tmp_path / "program.py")))
    monkeypatch.setattr(carry_out, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(study, "steps_of", lambda sweep, folder: {run.name: 2 for run in sweep.runs})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = Trained(**SHAPE, phases=[TrainedPhase("only", "1K", 8, 2, 0.1)])
    monkeypatch.setattr(Trained, "of", classmethod(lambda cls, run: shape))
    return Study(tmp_path)


def test_a_study_continues_on_another_machine(small_study: Study) -> None:
    (small_study.tmp_path / "first").mkdir()
    (small_study.tmp_path / "first/fails").touch()
    assert small_study("first") == 1
    assert small_study.measured == ["base-seed=1", "longer-seed=1", "base-seed=2"]  # seed by seed, each as it ended
    record = json.loads((small_study.kept / "text-longer-seed=1.json").read_text())
    assert record["settings"] == ["recipe=laptop", "optim.clip=2.0", "run.seed=1", "data.path=rows"]
    assert record["start"] == ["recipe=laptop", "run.seed=1", "data.path=rows"]
    assert record["found"] == {"of": "longer-seed=1"}
    assert record["minutes"] == 1.5
    assert small_study("second") == 0
    assert small_study.trained_at("second") == {"base-seed=2", "longer-seed=2"}  # that it starts from is not measured
    assert small_study.measured == ["longer-seed=2"]
    assert list(small_study.found) == ["base-seed=1", "base-seed=2", "longer-seed=1", "longer-seed=2"]
    assert small_study.found["base-seed=1"].trained.phases[0].seq_len == 8
    assert small_study.notes[-1] == f"results of earlier runs, by commits: {record['commit']} (3)"
    assert small_study("third") == 0
    assert small_study.trained_at("third") == set()


def test_results_of_other_settings_or_sizes_are_refused(small_study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert small_study("first") == 0
    assert small_study("first", rows=4) == 2
    assert "text-base-seed=1.json" in capsys.readouterr().err
    file = small_study.tmp_path / "study.yaml"
    file.write_text(FILE.replace("optim.clip=2.0", "optim.clip=3.0"))
    assert small_study("second") == 2
    assert "text-longer-seed=1.json" in capsys.readouterr().err
    assert small_study.trained_at("second") == set()


def test_measuring_trains_nothing_and_names_missing_runs(small_study: Study) -> None:
    assert small_study("first", "--measure") == 2
    assert small_study("first") == 0
    (small_study.kept / "text-longer-seed=2.json").unlink()
    assert small_study("second", "--measure") == 0
    assert small_study.trained_at("second") == set()
    assert any("longer-seed=2 (text)" in note for note in small_study.notes)


def test_data_folders_are_compared_by_name() -> None:
    run = SweepRun("a", "", {}, ("phases.0.data.path=/here/64", "data.mixture.a.path=there/128", "optim.clip=1"))
    assert portable(run) == ["phases.0.data.path=64", "data.mixture.a.path=128", "optim.clip=1"]
