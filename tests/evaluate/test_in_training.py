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


EXPERTS = [
    "model.layers.e={kind: moe, experts: 4, top_k: 2, hidden: 16, shared: 16}",
    "model.layers.x={kind: moe, experts: 4, top_k: 2, hidden: 16, scores: sigmoid, balance: bias, speed: 0.01}",
]
EXPERT_PATTERN = "MeWx"
EXPERT_LAYOUTS = [
    "parallel.expert=2 phases.0.micro_batch=2",
    "parallel.tensor=2 parallel.sequence=true parallel.expert=2 parallel.expert_tensor=1",
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


@pytest.mark.slow
def test_evaluation_in_training_equals_evaluate(run: Path, data: Path, tmp_path: Path) -> None:
    assert list(measured(run)) == [2, 4]
    for step, results in measured(run).items():
        options = ["--tasks", str(data.parent / "asked.yaml"), "--output", str(tmp_path / str(step)), "--rows", "1"]
        assert main(["evaluate", str(folder_of(run, step)), *options]) == 0
        rows = json.loads((tmp_path / str(step) / "results.json").read_text())["rows"]
        of_tasks = [row for row in rows if row["metric"] != "holds"]  # an instrument's
        assert results == {f"{row['task']}/{row['length']}/{row['metric']}": row["value"] for row in of_tasks}
    assert {"passkey[digits=1]/400/exact", "perplexity/32/loss"} <= measured(run)[2].keys()


def test_evaluation_changes_no_bit_of_training(run: Path, data: Path, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", data, PATTERN)
    assert losses(plain) == losses(run)
    assert measured(plain) == {}


@pytest.mark.slow
def test_a_resumed_run_measures_the_same(run: Path, data: Path, settings: list[str], tmp_path: Path) -> None:
    trained(tmp_path / "run", data, PATTERN, *settings, "run.max_steps=3")
    assert list(measured(tmp_path / "run")) == [2, 3]
    trained(tmp_path / "run", data, PATTERN, *settings)
    assert losses(tmp_path / "run") == losses(run)
    assert measured(tmp_path / "run")[4] == measured(run)[4]


REFUSED: dict[str, dict | None] = {
    "sambo": None,  # the name of no suite
    "passkye": {"tasks": [{"task": "passkye", "lengths": [400]}]},
    "length of 20": {"tasks": [{"task": "passkey", "lengths": [20]}]},
    "4001 tokens": {"perplexity": [{"lengths": [4000]}]},
}


@pytest.mark.parametrize("named", REFUSED)
def test_impossible_evaluations_are_refused_before_training(named: str, data: Path, tmp_path: Path, capsys) -> None:
    content = REFUSED[named]
    if content is None:
        suite = named
    else:
        suite = str(tmp_path / "asked.yaml")
        Path(suite).write_text(yaml.safe_dump(content))
    with pytest.raises(AssertionError):
        trained(tmp_path / "run", data, PATTERN, f"run.evaluate={suite}")
    message = capsys.readouterr().err
    assert "run.evaluate" in message
    assert named in message
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same(
    layout: str, run: Path, data: Path, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results agree up to the rounding of fp32, which four steps of training amplify little."""
    command: list[str] = []
    monkeypatch.setattr(train, "main", lambda arguments: command.extend(arguments) or 0)
    trained(tmp_path / "two", data, PATTERN, *settings, *layout.split())
    under_torchrun(["train", *command])
    for step, results in measured(tmp_path / "two").items():
        assert results.keys() == measured(run)[step].keys()
        assert results["perplexity/32/loss"] == pytest.approx(measured(run)[step]["perplexity/32/loss"], rel=1e-4)
    assert list(measured(tmp_path / "two")) == [2, 4]
    for step, results in held_out(run).items():
        assert held_out(tmp_path / "two")[step] == pytest.approx(results, rel=1e-4)
    lines = lines_of(tmp_path / "two" / "metrics.jsonl")
    if "context" in layout:
        assert all(1 < line["imbalance"] < 1.5 for line in lines), "a window sees less where a document begins"
    else:
        assert not any("imbalance" in line for line in lines)
    assert held_out(run)


@pytest.fixture(scope="module")
def of_experts(data: Path, settings: list[str]) -> Path:
    return trained(data.parent / "experts", data, EXPERT_PATTERN, *EXPERTS, *settings)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_ranks_that_divide_experts_measure_the_same(
    layout: str,
    of_experts: Path,
    data: Path,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of two ranks has half of the experts; afterwards one process reads the checkpoint, with all of them."""
    command: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(train, "main", lambda arguments: command.extend(arguments) or 0)
        trained(tmp_path / "two", data, EXPERT_PATTERN, *EXPERTS, *settings, *layout.split())
    under_torchrun(["train", *command])
    assert list(measured(tmp_path / "two")) == [2, 4]
    for step, results in measured(tmp_path / "two").items():
        assert results == pytest.approx(measured(of_experts)[step], rel=1e-4)
    assert held_out(tmp_path / "two").keys() == held_out(of_experts).keys()
    for step, results in held_out(of_experts).items():
        assert held_out(tmp_path / "two")[step] == pytest.approx(results, rel=1e-4)
    options = ["--tasks", str(data.parent / "asked.yaml"), "--output", str(tmp_path / "evaluated"), "--rows", "1"]
    assert main(["evaluate", str(folder_of(tmp_path / "two", 4)), *options]) == 0
    rows = json.loads((tmp_path / "evaluated" / "results.json").read_text())["rows"]
    of_tasks = {f"{r['task']}/{r['length']}/{r['metric']}": r["value"] for r in rows if r["metric"] != "holds"}
    assert of_tasks == pytest.approx(measured(tmp_path / "two")[4], rel=1e-4)
    capsys.readouterr()
    prompt = ["--prompt", "a b", "--tokens", "8", "--temperature", "0"]
    texts = []
    for folder in (tmp_path / "two", of_experts):
        assert main(["generate", str(folder), *prompt]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
