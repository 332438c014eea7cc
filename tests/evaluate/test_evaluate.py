"""An evaluation as a person starts it, on a run of a few steps: results checked by hand, killed and resumed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import evaluate
from hybridtron.cli.main import main
from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate import answers
from hybridtron.inference.generate import generate
from hybridtron.model.lm import LanguageModel
from hybridtron.problems import Code, Unusable
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import open_tokens
from tests.cli.test_evaluate import LENGTHS, VOCAB, lines_of, losses_by_hand, tokenizer, trained, write_data
from tests.refusals import raises_code

ROOT = Path(__file__).parents[2]
ASKED = {
    "samples": 3,
    "tasks": [
        {"task": "passkey", "lengths": [400], "samples": 5, "options": {"digits": 1, "depth_steps": 2}},
        {"task": "copying", "lengths": [23]},
    ],
    "perplexity": [{"lengths": ["2x"], "rows": 3}, {"context": 16, "stride": 8, "windows": 4}],
    "instruments": ["positions"],
    "instrument_length": "2x",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    data = write_data(folder / "toy", LENGTHS, tokenizer().to_str())
    return trained(folder / "run", data, "M-W-")


@pytest.fixture(scope="module")
def model(run: Path) -> LanguageModel:
    opened = Checkpoint.open(folder_of(run, 4))
    whole = LanguageModel(architecture(opened.config.model))
    opened.load_weights(whole)
    return whole


def asked(folder: Path, content: dict) -> Path:
    path = folder / "asked.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def evaluated(run: Path, output: Path, content: dict = ASKED, *more: str) -> Path:
    file = asked(run.parent, content)
    assert main(["evaluate", str(run), "--tasks", str(file), "--output", str(output), "--rows", "2", *more]) == 0
    return output


@pytest.fixture(scope="module")
def output(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated(run, tmp_path_factory.mktemp("out") / "once")


@pytest.mark.slow
def test_answers_equal_greedy_generation(run: Path, output: Path, model: LanguageModel) -> None:
    checkpoint = folder_of(run, 4)
    tokens = open_tokens(str(checkpoint))
    task = named("passkey", ["digits=1", "depth_steps=2"])
    lines = [record for record in lines_of(output / "samples.jsonl") if record.get("task", "").startswith("passkey")]
    assert [record["key"] for record in lines] == [f"passkey[digits=1,depth_steps=2]/400/0/{i}" for i in range(5)]
    for index, line in enumerate(lines):
        sample = task.sample(0, index, tokens, 400)
        generated = generate(model, torch.tensor([sample.prompt_tokens]), sample.generate, 0, 0)[0].tolist()
        end = generated.index(0) if 0 in generated else len(generated)
        assert line["written"] == tokens.decode(generated[:end])
        assert line["metrics"] == task.score(sample, line["written"])
        assert line["depth"] == index % 2


@torch.no_grad()
def test_tasks_on_token_ids_are_scored_at_every_position(output: Path, model: LanguageModel) -> None:
    task = named("copying")
    lines = [record for record in lines_of(output / "samples.jsonl") if record.get("task") == "copying"]
    assert len(lines) == 3
    for index, line in enumerate(lines):
        sample = task.sample(0, index, open_tokens("bytes"), 23)
        logits_LBV = model(torch.tensor([sample.tokens]), None, SeqInfo.stream(1, len(sample.tokens))).output
        assert line["metrics"] == task.score_tokens(sample, logits_LBV[:, 0].argmax(-1).tolist())  # type: ignore[attr-defined]


def test_perplexity_equals_losses_by_hand(run: Path, output: Path) -> None:
    results = json.loads((output / "results.json").read_text())["rows"]
    perplexity_rows = {(row["task"], row["metric"]): row for row in results if row["task"].startswith("perplexity")}
    documents = [(np.arange(33) + 50 * i) % (VOCAB - 1) + 1 for i in (0, 1, 3)]
    expected = np.mean(losses_by_hand(folder_of(run, 4), documents))
    assert perplexity_rows["perplexity", "loss"]["value"] == pytest.approx(expected, rel=1e-4)
    assert perplexity_rows["perplexity", "perplexity"]["value"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert perplexity_rows["perplexity", "loss"]["n"] == 3

    text = np.append(np.arange(40) % (VOCAB - 1) + 1, 0)  # the first document, which is as long with its end
    sums = []
    for window in range(4):
        losses = losses_by_hand(folder_of(run, 4), [text[8 * window :][:17]])
        sums += losses if window == 0 else losses[-8:]
    sliding = perplexity_rows["perplexity[stride=8,score=new]", "loss"]
    assert sliding["tokens"] == 16 + 3 * 8
    assert sliding["value"] == pytest.approx(np.mean(sums), rel=1e-4)


def test_every_row_records_its_measurement(output: Path) -> None:
    results = json.loads((output / "results.json").read_text())["rows"]
    assert {row["metric"] for row in results} >= {
        "exact",
        "token_exact",
        "accuracy",
        "perplexity",
        "bits_per_byte",
        "holds",
    }
    for row in results:
        assert row["about"].keys() >= {"checkpoint", "tokenizer", "dtype", "kernels", "attention", "seq_len", "step"}
        assert row["about"]["attention"] == {"W": "window 8"}
        assert row["n"] >= 2
        assert row.keys() >= {"standard_error", "seed"}
    names = {"samples.jsonl", "results.json", "index.html", "by_length.png"}
    names.add("passkey-digits-1-depth_steps-2_depth.png")
    assert {file.name for file in output.iterdir()} == names | {"positions.jsonl", "positions.png"}
    assert "data:image/png;base64," in (output / "index.html").read_text()


@pytest.mark.parametrize("kept", [3, 12])
def test_a_killed_evaluation_continues(
    run: Path, output: Path, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it after some lines, and in the middle of the next; nothing is asked twice, and the file is the same."""
    whole = (output / "samples.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
    scored = answers.answer_batch
    counted = []
    monkeypatch.setattr(answers, "answer_batch", lambda *arguments: counted.extend(arguments[2]) or scored(*arguments))
    evaluated(run, tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == whole
    assert len(counted) == max(0, 5 + 3 - (kept - 1))
    assert (tmp_path / "results.json").read_bytes() == (output / "results.json").read_bytes()


def test_records_of_other_data_are_not_continued(run: Path, output: Path, tmp_path: Path) -> None:
    shutil.copytree(output, tmp_path / "out")
    other = write_data(tmp_path / "other", LENGTHS[::-1], tokenizer().to_str())
    file = asked(tmp_path, ASKED)
    options = ["--tasks", str(file), "--output", str(tmp_path / "out"), "--rows", "2"]
    with raises_code(Unusable, "changed", "'data': None"):
        evaluate.main([str(run), *options, "--data", str(other)])


def test_a_batch_of_one_gives_equal_answers(run: Path, output: Path, tmp_path: Path) -> None:
    alone = evaluated(run, tmp_path, ASKED, "--batch", "1")
    once, again = (lines_of(folder / "samples.jsonl") for folder in (output, alone))
    assert [line for line in again if "metrics" in line] == [line for line in once if "metrics" in line]
    for record, expected_line in zip(again, once, strict=True):
        assert record.get("nats", 0.0) == pytest.approx(expected_line.get("nats", 0.0), rel=1e-5)


def test_records_of_another_step_are_not_continued(run: Path, output: Path, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text((output / "samples.jsonl").read_text().replace('"step": 4', '"step": 5'))
    file = asked(tmp_path, ASKED)
    with raises_code(Unusable, "changed", "'step': 5"):
        evaluate.main([str(run), "--tasks", str(file), "--output", str(tmp_path)])


def test_a_suite_leaves_out_tasks_that_do_not_fit(run: Path, tmp_path: Path, capsys) -> None:
    options = ["--suite", "samba", "--samples", "2", "--lengths", "1x", "30x", "--length", "2x"]
    with raises_code(Unusable, "does-not-fit", "481 tokens"):  # too little text for perplexity at that length
        evaluate.main([str(run), *options, "--output", str(tmp_path), "--instruments", "states"])
    options = ["--suite", "samba", "--samples", "2", "--lengths", "1x", "2x", "--length", "2x"]
    assert main(["evaluate", str(run), *options, "--output", str(tmp_path), "--instruments", "states"]) == 0
    said = capsys.readouterr().out
    assert said.count("left out: passkey at") == 2
    results = json.loads((tmp_path / "results.json").read_text())
    assert {(row["task"], row["length"]) for row in results["rows"]} == {("perplexity", 16), ("perplexity", 32)}
    assert len(results["left_out"]) == 2
    assert "passkey at 16" in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_several_runs_are_compared(run: Path, tmp_path: Path, capsys) -> None:
    instruments = {"instruments": ["positions"], "instrument_length": "1x"}
    file = asked(tmp_path, {"perplexity": [{"lengths": ["1x"], "rows": 2}], **instruments})
    runs = [str(folder_of(run, step)) for step in (2, 4)]
    assert main(["evaluate", *runs, "--tasks", str(file), "--output", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert len({row["run"] for row in rows}) == 2
    assert "Side by side" in (tmp_path / "out/index.html").read_text()
    assert {file.name for file in (tmp_path / "out").glob("*.png")} == {"by_length.png", "positions.png"}
    with pytest.raises(SystemExit):
        main(["evaluate", *runs, "--tasks", str(file)])
    assert "--output" in capsys.readouterr().err


ESSAYS = {"essay": "files:nowhere", "haystack": "essay"}
REFUSED: list[tuple[Code, str, dict]] = [
    ("unknown-name", "passkye", {"tasks": [{"task": "passkye", "lengths": [400]}]}),
    ("does-not-fit", "length of 20", {"tasks": [{"task": "passkey", "lengths": [400, 20]}]}),
    ("does-not-fit", "qa_1", {"tasks": [{"task": "qa_1", "lengths": [4000], "samples": 1}]}),
    ("does-not-fit", "nowhere", {"tasks": [{"task": "needle", "lengths": [4000], "options": ESSAYS}]}),
    ("does-not-fit", "8192", {"tasks": [{"task": "mqar", "lengths": [64]}]}),
    ("does-not-fit", "4001 tokens", {"perplexity": [{"lengths": [4000]}]}),
    ("does-not-fit", "4801 tokens", {"perplexity": [{"context": 16, "stride": 16, "windows": 300}]}),
    ("out-of-range", "context is 17", {"perplexity": [{"context": 17, "stride": 8}]}),
    ("out-of-range", "context=16", {"perplexity": [{"context": 16, "stride": 17}]}),
    ("unknown-name", "'old'", {"perplexity": [{"context": 16, "score": "old"}]}),
]


@pytest.mark.parametrize(("code", "named", "content"), REFUSED, ids=[name for _, name, _ in REFUSED])
def test_wrong_tasks_and_options_are_refused_before_reading(
    code: Code, named: str, content: dict, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtron.model.lm.LanguageModel.forward", None)
    file = asked(tmp_path, content)
    with raises_code(Unusable, code, named):
        evaluate.main([str(run), "--tasks", str(file), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_than_the_models_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = tokenizer()
    larger.add_tokens([f"another{number}" for number in range(VOCAB)])
    monkeypatch.setattr("hybridtron.evaluate.loaded_model.tokenizer_of", lambda checkpoint: larger)
    with raises_code(Unusable, "mismatch", larger.get_vocab_size(), "model.vocab_size", VOCAB):
        evaluate.main([str(run), "--tasks", str(asked(tmp_path, ASKED)), "--output", str(tmp_path / "out")])


def test_wrong_arguments_are_refused_by_name(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "list.yaml").write_text("- passkey")
    (tmp_path / "torn.yaml").write_text("tasks: [")
    for name in ("list.yaml", "torn.yaml", "nowhere.yaml"):
        assert main(["evaluate", str(run), "--tasks", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
    for wrong in (["--suite", "sambo"], ["--suite", "samba", "--tasks", "x.yaml"], ["--samples", "0"]):
        with pytest.raises(SystemExit):
            main(["evaluate", str(run), *wrong])
        assert wrong[0] in capsys.readouterr().err


def under_torchrun(arguments: Sequence[object]) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hybridtron"]
    command = [sys.executable, *launcher, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["", "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"])
def test_two_processes_measure_the_results_of_one(layout: str, run: Path, output: Path, tmp_path: Path) -> None:
    """Samples are shared out, or the model is."""
    file = asked(tmp_path, ASKED)
    options = ["--tasks", file, "--output", tmp_path / "two", "--rows", "2", "--batch", "2"]
    under_torchrun(["evaluate", run, *layout.split(), *options])
    lines = [line for line in lines_of(tmp_path / "two/samples.jsonl") if "about" not in line]
    keys = {line["key"] for line in lines}
    expected = [line for line in lines_of(output / "samples.jsonl") if line.get("key") in keys]
    assert len(lines) == 5 + 3 + 3 + 4 + 1
    for line, expected_line in zip(lines, expected, strict=True):
        assert line.pop("nats", 0.0) == pytest.approx(expected_line.pop("nats", 0.0), rel=1e-5)
        assert line == expected_line
    measured = lines_of(tmp_path / "two" / "positions.jsonl")
    for line, expected_line in zip(measured, lines_of(output / "positions.jsonl"), strict=True):
        assert line["position"] == expected_line["position"]
        assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-5)
        assert line["loss_within"] == pytest.approx(expected_line["loss_within"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"])
def test_two_processes_write_the_text_of_one(layout: str, run: Path, capsys) -> None:
    options = [run, "--prompt", "the cat", "--prompt", "on", "--tokens", "12", "--seed", "3", "--past-end"]
    assert main(["generate", *map(str, options)]) == 0
    assert under_torchrun(["generate", *options, layout]) == capsys.readouterr().out
