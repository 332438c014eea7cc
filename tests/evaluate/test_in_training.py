"""`run.evaluate`: a run measures the same as `hybridtron evaluate`, and trains with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import train
from hybridtron.cli.main import main
from tests.cli.test_evaluate import LENGTHS, lines_of, tokenizer, trained, write_data
from tests.evaluate.test_evaluate import under_torchrun

ASKED = {
    "samples": 2,
    "tasks": [
        {"task": "passkey", "lengths": [400], "options": {"digits": 1}},
        {"task": "copying", "lengths": [23]},
    ],
    "perplexity": [{"lengths": ["2x"], "rows": 3}],
    "instruments": ["positions"],
}
PATTERN = "M-W-"
LAYOUTS = [
    "parallel.tensor=2 parallel.sequence=true",
    "parallel.pipeline=2 phases.0.micro_batch=2",
    "phases.0.micro_batch=2",
    "parallel.context=2",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "asked.yaml").write_text(yaml.safe_dump(ASKED))
    return write_data(folder / "toy", LENGTHS, tokenizer().to_str())


@pytest.fixture(scope="module")
def settings(data: Path) -> list[str]:
    return [f"run.evaluate={data.parent / 'asked.yaml'}", "run.evaluate_every=2", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def run(data: Path, settings: list[str]) -> Path:
    return trained(data.parent / "run", data, PATTERN, *settings)


def measured(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line["evaluation"] for line in lines_of(run / "metrics.jsonl") if "evaluation" in line}


def held_out(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line["validation"] for line in lines_of(run / "metrics.jsonl") if line.get("validation")}


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in lines_of(run / "metrics.jsonl")]


def test_evaluation_in_training_equals_evaluate(run: Path, data: Path, tmp_path: Path) -> None:
    assert list(measured(run)) == [2, 4]
    for step, found in measured(run).items():
        options = ["--tasks", str(data.parent / "asked.yaml"), "--output", str(tmp_path / str(step)), "--rows", "1"]
        assert main(["evaluate", str(folder_of(run, step)), *options]) == 0
        rows = json.loads((tmp_path / str(step) / "results.json").read_text())["rows"]
        of_tasks = [row for row in rows if row["metric"] != "holds"]  # an instrument's
        assert found == {f"{row['task']}/{row['length']}/{row['metric']}": row["value"] for row in of_tasks}
    assert {"passkey[digits=1]/400/exact", "perplexity/32/loss"} <= measured(run)[2].keys()


def test_training_has_the_same_bits_without_it(run: Path, data: Path, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", data, PATTERN)
    assert losses(plain) == losses(run)
    assert measured(plain) == {}


def test_a_run_that_resumes_measures_the_same(run: Path, data: Path, settings: list[str], tmp_path: Path) -> None:
    trained(tmp_path / "run", data, PATTERN, *settings, "run.max_steps=3")
    assert list(measured(tmp_path / "run")) == [2, 3]
    trained(tmp_path / "run", data, PATTERN, *settings)
    assert losses(tmp_path / "run") == losses(run)
    assert measured(tmp_path / "run")[4] == measured(run)[4]


REFUSED = {
    "did you mean samba": "sambo",
    "no task passkye": {"tasks": [{"task": "passkye", "lengths": [400]}]},
    "can't fit the sample": {"tasks": [{"task": "passkey", "lengths": [20]}]},
    "takes 4001 tokens": {"perplexity": [{"lengths": [4000]}]},
}


@pytest.mark.parametrize("said", REFUSED)
def test_impossible_evaluations_are_refused_before_training(said: str, data: Path, tmp_path: Path, capsys) -> None:
    asked = REFUSED[said]
    if isinstance(asked, dict):
        (tmp_path / "asked.yaml").write_text(yaml.safe_dump(asked))
    name = asked if isinstance(asked, str) else str(tmp_path / "asked.yaml")
    with pytest.raises(AssertionError):
        trained(tmp_path / "run", data, PATTERN, f"run.evaluate={name}")
    message = capsys.readouterr().err
    assert "run.evaluate" in message
    assert said.split(",")[0] in message
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same(
    layout: str, run: Path, data: Path, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results agree up to the rounding of fp32, which four steps of training amplify little."""
    given: list[str] = []
    monkeypatch.setattr(train, "main", lambda arguments: given.extend(arguments) or 0)
    trained(tmp_path / "two", data, PATTERN, *settings, *layout.split())
    under_torchrun("train", *given)
    for step, found in measured(tmp_path / "two").items():
        assert found.keys() == measured(run)[step].keys()
        assert found["perplexity/32/loss"] == pytest.approx(measured(run)[step]["perplexity/32/loss"], rel=1e-4)
    assert list(measured(tmp_path / "two")) == [2, 4]
    for step, found in held_out(run).items():
        assert held_out(tmp_path / "two")[step] == pytest.approx(found, rel=1e-4)
    lines = lines_of(tmp_path / "two" / "metrics.jsonl")
    if "context" in layout:
        assert all(1 < line["imbalance"] < 1.5 for line in lines), "a window sees less where a document begins"
    else:
        assert not any("imbalance" in line for line in lines)
    assert held_out(run)
