"""The instruments as a person uses them, on runs of a few steps; and every way in which there is nothing to measure."""

from __future__ import annotations

import errno
import html
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import evaluate, train
from hybridtron.cli.main import main
from hybridtron.data.batch import SeqInfo
from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.data.prepare.writer import write_folder
from hybridtron.evaluate import length as instruments
from hybridtron.model.lm import LanguageModel
from hybridtron.problems import Code
from hybridtron.progress import progress_bar
from tests.refusals import refusal, usage_error
from tests.slow import slow_except

ROOT = Path(__file__).parents[2]
VOCAB = 300
WRITTEN = ("samples.jsonl", "results.json", "index.html")
LENGTHS = [40, 90, 7, 130, 90]  # of the validation documents without eos


def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat sat on the mat. " * 20], VOCAB)


def write_data(path: Path, validation: list[int], vocabulary: str) -> Path:
    """Documents that count up, each from its own start."""
    documents = [(np.arange(size) + 50 * i) % (VOCAB - 1) + 1 for i, size in enumerate(validation)]
    splits = {"train": {"text": [np.arange(400) % (VOCAB - 1) + 1]}, "validation": {"text": documents}}
    write_folder(path, splits, vocabulary, VOCAB, 0, {"corpus": "toy"})
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "toy", LENGTHS, tokenizer().to_str())


def trained(run: Path, data: Path, pattern: str, *more: str) -> Path:
    arguments = [
        "data=folder", f"data.path={data}", f"run.dir={run}", f"model.pattern={pattern}", "model.width=32",
        f"model.vocab_size={VOCAB}", "model.layers.M.state=4", "model.layers.W.window=8", "model.layers.-.hidden=32",
        "model.layers.S={kind:mamba2,state:4,head_dim:16}", "phases.0.seq_len=16", "phases.0.global_batch=4",
        "phases.0.micro_batch=4", "phases.0.tokens=256", "run.eval_tokens=64", "optim.warmup=1", "checkpoint.every=2",
        *more,
    ]  # fmt: skip
    assert train.main(arguments) == 0
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return trained(tmp_path_factory.mktemp("hybrid") / "run", data, "M-W-S-")


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def reported(capsys: pytest.CaptureFixture[str], arguments: Sequence[object]) -> str:
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def losses_by_hand(checkpoint: Path, rows: list[np.ndarray]) -> list[float]:
    opened = Checkpoint.open(checkpoint)
    model = LanguageModel(architecture(opened.config.model))
    opened.load_weights(model)
    tokens_BT = torch.from_numpy(np.stack(rows)).long()
    with torch.no_grad():
        logits_LBV = model(tokens_BT[:, :-1], None, SeqInfo.stream(len(rows), tokens_BT.shape[1] - 1)).output
    return F.cross_entropy(logits_LBV.movedim(2, 1), tokens_BT[:, 1:].T, reduction="none").mean(1).tolist()


@pytest.mark.slow
def test_evaluation_reads_documents_that_are_long_enough(run: Path, capsys) -> None:
    said = reported(capsys, [run, "--length", "80", "--rows", "3"])
    assert "3 long documents" in said
    assert "trained on rows of 16 tokens" in said
    assert "\x1b" not in said
    output = run / "evaluation" / "step-00000004"
    names = ("positions", "remembrance", "states", "entropy")
    files = {f"{name}.{kind}" for name in names for kind in ("jsonl", "png")}
    assert {file.name for file in output.iterdir()} == {*files, *WRITTEN}
    assert said.splitlines()[-1] == f"written: {output / 'index.html'}"
    page = (output / "index.html").read_text()
    results = json.loads((output / "results.json").read_text())
    assert page.count("data:image/png;base64,") == 4
    for name in names:
        title = results["instruments"][name]["title"]
        assert title.startswith(f"{name}: ")
        assert title in said
        assert html.escape(title) in page
    assert page.count(f"{run.name}, step 4") == 2  # of the window and of the page
    assert [row["metric"] for row in results["rows"]] == ["holds"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in output.glob("*.png"))
    lines = lines_of(output / "positions.jsonl")
    assert [line["position"] for line in lines] == list(range(1, 81))
    assert all(line["attention"] == {"W": "window 8"} for line in lines)
    documents = [(np.arange(81) + 50 * i) % (VOCAB - 1) + 1 for i in (1, 3, 4)]
    expected = losses_by_hand(folder_of(run, 4), documents)
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-4)
    assert [line["perplexity"] for line in lines] == pytest.approx([math.exp(loss) for loss in expected], rel=1e-3)
    within = [line["loss_within"] for line in lines]
    assert within[:16] == pytest.approx(expected[:16], rel=1e-4)
    assert within[-8:] == pytest.approx(
        losses_by_hand(folder_of(run, 4), [document[-17:] for document in documents])[-8:], rel=1e-4
    )
    assert re.search(r"64 *to 4x .*\n *65 to 80 *to 5x", said)
    assert re.search(r"generalizes? to this length: perplexity is at most [\d.]+ times that with context limited", said)


def test_files_hold_the_measurements_of_the_instruments(run: Path, tmp_path: Path, capsys) -> None:
    said = reported(capsys, [folder_of(run, 4), "--length", "4x", "--output", tmp_path / "a/b"])
    assert "(8 were asked for)" in said
    moved = lines_of(tmp_path / "a/b/remembrance.jsonl")
    assert {line["length"] for line in moved} == {64}
    none_at_all = {"total_variation": 0, "jensen_shannon": 0, "cosine": pytest.approx(0)}
    assert moved[0] == {"length": 64, "t": 0, **none_at_all, "attention": {"W": "window 8"}}
    assert moved[-1]["t"] == 63
    assert 0 < moved[-1]["total_variation"] <= 1
    deviations = lines_of(tmp_path / "a/b/states.jsonl")
    assert [(line["position"], line["layer"]) for line in deviations[:3]] == [(1, 0), (1, 4), (2, 0)]
    assert {line["layer"]: len(line["deviations"]) for line in deviations} == {0: 1, 4: 4}
    assert deviations[-1]["position"] == 64
    assert min(line["overall"] for line in deviations) > 0


@pytest.mark.slow
def test_recorded_results_are_shown_without_measuring_again(
    run: Path, data: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded results are shown even where the data is gone; another length, other data or attention is measured."""
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    arguments = [moved, "--length", "4x", "--rows", "2", "--instruments", "states,positions"]
    first = reported(capsys, arguments)
    output = moved / "evaluation" / "step-00000004"
    files = {file.name: file.read_bytes() for file in output.iterdir()}
    data_gone = tmp_path / "gone"
    data.rename(data_gone)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("hybridtron.evaluate.length.read_chunks", None)
            assert reported(capsys, arguments) == first
            assert {file.name: file.read_bytes() for file in output.iterdir()} == files
        error = refusal(evaluate.main, [moved, "--length", "2x"])
        assert error.code == "no-file"
        assert "--data PATH" in str(error)
    finally:
        data_gone.rename(data)
    lengths = {"2x": 32, "4x": 64}
    for length in ("2x", "4x"):
        reported(capsys, [moved, "--length", length, "--rows", "2", "--instruments", "positions"])
        assert len(lines_of(output / "positions.jsonl")) == lengths[length]
    again = lines_of(output / "positions.jsonl")
    assert again == [json.loads(line) for line in files["positions.jsonl"].decode().splitlines()]
    arguments[-1] = "positions"
    reported(capsys, [*arguments, "--attention", "full"])
    assert all(line["attention"] == {"W": "full"} for line in lines_of(output / "positions.jsonl"))
    other = write_data(tmp_path / "other", [90, 80], tokenizer().to_str())
    assert "2 long documents" in reported(capsys, [*arguments, "--data", other])
    assert lines_of(output / "positions.jsonl") != again


def test_progress_is_printed_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress is a line every 30 seconds, with the time left at the pace so far."""
    seconds = iter([0.0, 10.0, 40.0, 50.0, 80.0])
    monkeypatch.setattr("hybridtron.progress.time.monotonic", lambda: next(seconds))
    with progress_bar("states (2 of 4)") as moved:
        for done in (1, 4, 5, 8):
            moved(done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "states (2 of 4): 4 of 10, 0:01:00 left",
        "states (2 of 4): 8 of 10, 0:00:20 left",
    ]


def test_page_lists_the_kernels_of_the_model(data: Path, tmp_path: Path, capsys) -> None:
    run = trained(tmp_path / "run", data, "W-")
    reported(capsys, [run, "--length", "32", "--instruments", "positions", "--rows", "1"])
    kernels = lines_of(run / "evaluation/step-00000004/samples.jsonl")[0]["about"]["kernels"]
    assert {"attention", "swiglu", "linear_cross_entropy"} <= kernels.keys()
    assert not {"selective_scan", "ssd_scan", "delta_scan"} & kernels.keys()
    page = (run / "evaluation/step-00000004/index.html").read_text()
    assert page.index("step: 4") < page.index("kernels: ") < page.index("checkpoint: ")
    assert "selective_scan" not in page


def test_short_documents_are_packed_into_long_rows(run: Path, data: Path, tmp_path: Path, capsys) -> None:
    said = reported(capsys, [run, "--length", "150", "--instruments", "positions", "--output", tmp_path])
    assert "2 rows of 150 tokens" in said
    assert "packed end to end" in said
    assert {file.name for file in tmp_path.iterdir()} == {"positions.jsonl", "positions.png", *WRITTEN}
    documents = [np.append((np.arange(size) + 50 * i) % (VOCAB - 1) + 1, 0) for i, size in enumerate(LENGTHS)]
    rows = np.concatenate(documents)[: 2 * 151].reshape(2, 151)
    expected = losses_by_hand(folder_of(run, 4), list(rows))
    assert [line["loss"] for line in lines_of(tmp_path / "positions.jsonl")] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_other_data_must_have_the_same_tokenizer(run: Path, tmp_path: Path, capsys) -> None:
    other = write_data(tmp_path / "long", [500, 500], tokenizer().to_str())
    options = ["--length", "500", "--instruments", "positions,states", "--output", tmp_path / "out"]
    assert "2 long documents" in reported(capsys, [run, "--data", other, *options])
    strange = write_data(tmp_path / "strange", [500], train_tokenizer(["other words"], VOCAB).to_str())
    assert refusal(evaluate.main, [run, "--data", strange]).code == "mismatch"
    assert refusal(evaluate.main, [run, "--data", tmp_path / "nowhere"]).code == "no-file"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "used"),
    [
        pytest.param("relevance:previous_chunk,eval:span", "span 8", marks=pytest.mark.slow),
        pytest.param("relevance:chunk,eval:span", "span 8", marks=pytest.mark.slow),
        ("relevance:previous_chunk", "full"),
    ],
)
def test_losses_of_span_attention_do_not_depend_on_the_piece_size(
    options: str, used: str, data: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that chooses its own blocks must be read in one piece, and is, even if less would fit."""
    spans = f"model.layers.X={{kind:span,heads:2,chunk:[4,8],block:2,blocks:2,{options}}}"
    run = trained(tmp_path / "run", data, "M-X-", spans)
    arguments = [run, "--length", "77", "--rows", "3", "--instruments", "positions", "--output", tmp_path]
    documents = [(np.arange(78) + 50 * i) % (VOCAB - 1) + 1 for i in (1, 3, 4)]
    expected = losses_by_hand(folder_of(run, 4), documents)
    for tokens in (128, 32, 2):
        monkeypatch.setattr(instruments, "CHUNK_VALUES", tokens * 3 * VOCAB)
        reported(capsys, arguments)
        lines = lines_of(tmp_path / "positions.jsonl")
        assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-4)
        assert all(line["attention"] == {"X": used} for line in lines)


def test_model_without_a_recurrent_state_has_no_states_to_measure(data: Path, tmp_path: Path, capsys) -> None:
    run = trained(tmp_path / "run", data, "W-")
    said = reported(capsys, [run, "--length", "32", "--instruments", "states", "--rows", "1"])
    assert "nothing to measure" in said
    assert not list((run / "evaluation").rglob("states*"))


@pytest.mark.parametrize(
    ("place", "path"),
    slow_except(
        [
            (".", "."),
            ("logs", ".."),
            (".", "checkpoints/step-00000004"),
            ("checkpoints/step-00000004", "."),
            ("checkpoints", "step-00000004"),
        ],
        ("logs", ".."),
        ("checkpoints/step-00000004", "."),
    ),
)
def test_a_run_is_named_from_within_its_folder(
    place: str, path: str, run: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("evaluation"))
    monkeypatch.chdir(moved / place)
    options = ["--length", "2x", "--rows", "1", "--instruments", "positions"]
    lines = reported(capsys, [path, *options]).splitlines()
    assert lines[0] == "moved, step 4"
    assert lines[-1] == f"written: {moved / 'evaluation/step-00000004/index.html'}"
    assert (moved / "evaluation/step-00000004/results.json").exists()


def test_runs_to_compare_are_named_from_within_one_of_them(run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    for name in ("first", "second"):
        shutil.copytree(run, tmp_path / name, ignore=shutil.ignore_patterns("evaluation"))
    monkeypatch.chdir(tmp_path / "first")
    options = ["--length", "2x", "--rows", "1", "--instruments", "positions", "--output", tmp_path / "out"]
    said = reported(capsys, [".", "../second", *options])
    assert "first, step 4" in said.splitlines()
    assert "second, step 4" in said.splitlines()
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {
        "first-step-00000004",
        "second-step-00000004",
    }


def test_too_little_text_is_refused(run: Path) -> None:
    error = refusal(evaluate.main, [run, "--length", "400"])
    assert error.code == "does-not-fit"
    for tokens in (401, sum(LENGTHS) + len(LENGTHS)):
        assert str(tokens) in str(error)


def test_path_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    assert refusal(evaluate.main, [tmp_path / "nowhere"]).code == "no-file"
    (tmp_path / "empty").mkdir()
    assert refusal(evaluate.main, [tmp_path / "empty"]).code == "no-file"
    broken = tmp_path / "step-00000004"
    broken.mkdir()
    for name in ("manifest.json", "config.yaml", "tokenizer.json"):
        (broken / name).write_bytes((folder_of(run, 4) / name).read_bytes())
    error = refusal(evaluate.main, [broken])
    assert error.code == "unreadable"
    assert "model-00000.safetensors" in str(error)
    (tmp_path / "file").touch()
    assert "file" in str(refusal(evaluate.main, [run, "--length", "32", "--output", tmp_path / "file"]))


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("--instruments", "tuba", "unknown-name"),
        ("--instruments", "", "unknown-name"),
        ("--length", "0", "malformed"),
        ("--length", "0x", "malformed"),
        ("--length", "-4", "malformed"),
        ("--length", "1.5x", "malformed"),
        ("--rows", "0", "malformed"),
    ],
)
def test_wrong_arguments_are_refused(run: Path, option: str, value: str, code: Code) -> None:
    assert usage_error(evaluate.main, [run, option, value]) == (option, code)


def test_full_disk_names_the_folder_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint = tmp_path / "run/checkpoints/step-00000008"
    monkeypatch.setattr(evaluate, "newest_checkpoint", lambda _: checkpoint)
    monkeypatch.setattr(evaluate, "measure", fill)
    message = str(refusal(evaluate.main, [checkpoint]))
    assert message.startswith(f"{tmp_path}/run/evaluation/step-00000008: No space left on device; ")
    assert f"are free at {tmp_path}:" in message
