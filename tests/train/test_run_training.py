"""Full runs through train.py: their files, their resumption, and refusals."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.config.load import load, to_yaml
from hybridtron.config.resolve import RunPlan
from hybridtron.data.batch import Batch
from hybridtron.data.loader import STACKS
from hybridtron.engine.engine import Engine
from hybridtron.engine.schedule import StepLoss
from hybridtron.parallel.groups import Groups
from hybridtron.problems import Code, ConfigError
from hybridtron.storage.digest import digest_of
from hybridtron.train.report import sample_report
from hybridtron.train.run_training import find_start, open_run_folder
from hybridtron.train.supervisor.sections import VARIABLE, SectionPipe
from tests.train.conftest import VOCAB, Refused, Train, small_run_arguments
from tests.train.faults import ending_of, outcome_of

REQUIRED_METRICS = {
    "step", "phase", "tokens", "loss", "grad_norm", "lr", "step_time", "tokens_per_second", "tflops_per_device", "mfu",
    "skipped", "data_wait", "time", "memory_gib",
}  # fmt: skip


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_weights(left: Path, right: Path) -> bool:
    a, b = (load_file(path / "model-00000.safetensors") for path in (left, right))
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_a_run_learns_and_writes_its_files(train_small: Train, tmp_path: Path) -> None:
    mixture = "data.mixture={a: {weight: 3, source: text}, b: {weight: 1, source: text}}"
    assert train_small("phases.0.tokens=8K", "run.eval_every=125", mixture) == 0
    run = tmp_path / "run"
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(1, 126))
    assert set(lines[0]) == REQUIRED_METRICS
    assert lines[-1]["tokens"] == 8000
    assert lines[0]["loss"] == pytest.approx(math.log(VOCAB), rel=0.1)
    assert lines[-1]["loss"] < 0.6 * math.log(VOCAB)
    assert set(lines[-1]["validation"]) == {"1x", "2x", "3x", "4x"}
    assert lines[-1]["validation"]["1x"] < 0.6 * math.log(VOCAB)
    by_source = lines[-1]["validation_by_source"]
    assert set(by_source) == {"a", "b"}
    assert min(by_source.values()) <= lines[-1]["validation"]["1x"] <= max(by_source.values())
    outcome = outcome_of(run)
    assert (outcome["outcome"], outcome["step"], outcome["loss"]) == ("finished", 125, lines[-1]["loss"])
    assert outcome["validation"] == lines[-1]["validation"]
    assert outcome["checkpoint"] == str(run / "checkpoints" / "step-00000125")
    assert outcome["seconds"] > 0
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["latest", "step-00000120", "step-00000125"]


def test_resume_continues_bit_identically(train_small: Train, tmp_path: Path) -> None:
    assert train_small() == 0
    straight = tmp_path / "run"
    losses = [line["loss"] for line in metrics_of(tmp_path / "run")]
    straight.rename(tmp_path / "straight")
    assert train_small("run.max_steps=7") == 0
    assert train_small() == 0
    assert [line["loss"] for line in metrics_of(tmp_path / "run")] == losses
    assert same_weights(checkpoints.folder_of(tmp_path / "straight", 20), checkpoints.folder_of(tmp_path / "run", 20))


@pytest.mark.slow
def test_metrics_are_cut_back_to_the_resumed_step(train_small: Train, tmp_path: Path) -> None:
    assert train_small("run.max_steps=7") == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 1.0}\n{"step": 9, "lo')
    assert train_small("run.max_steps=9") == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == list(range(1, 10))


@pytest.mark.slow
def test_a_new_start_archives_earlier_checkpoints(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the next start would resume from them, and retention would remove the new run's own."""
    assert train_small("run.max_steps=4", "checkpoint.every=2") == 0
    old = tmp_path / "run/checkpoints/step-00000002"
    assert train_small("run.max_steps=3", "checkpoint.every=2", f"run.resume={old}") == 0
    assert "superseded-step-00000004" in capsys.readouterr().out
    assert train_small("run.max_steps=1", "checkpoint.every=2", "run.resume=never") == 0
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "latest", "step-00000001", *(f"superseded-step-0000000{step}" for step in (2, 3, 4)),
    ]  # fmt: skip


def test_a_finished_run_is_left_alone(train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_small("run.max_steps=2") == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert train_small("run.max_steps=2") == 0
    assert "run.dir=" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


CHANGED = {
    ("phases.0.lr=1e-4",): {"phases.0.lr": ("0.0001", "0.003")},
    ("run.max_steps=1",): {"run.max_steps": ("1", "2")},
    ("phases.0.tokens=64",): {"phases.0.tokens": ("'64'", "'1280'")},
    ("data.mixture={text: {weight: 1}}",): {"data.mixture.text.weight": ("1.0", "not set")},
    ("run.seed=7", "optim.clip=0.5"): {"run.seed": ("7", "1234"), "optim.clip": ("0.5", "1.0")},
}
"""Changed keys by settings; each key has its new value and the value that the run had."""


def test_a_finished_run_refuses_changed_keys(train_small: Train, refused: Refused, tmp_path: Path) -> None:
    """A finished run would ignore other keys; only keys that say how or where it is started may differ."""
    assert train_small("run.max_steps=2") == 0
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "LOCK"}
    for changed, expected in CHANGED.items():
        problems = refused("run.max_steps=2", changed)
        assert {problem.code for problem in problems.values()} == {"changed"}
        assert "run.dir" in problems
        for key, (now, then) in expected.items():
            assert f"is {now}," in problems[key].message
            assert f"was {then} " in problems[key].message
    ways = ("cluster.name=other", "run.max_minutes=5", "run.timeout=99", "parallel.recompute=layer")
    assert train_small("run.max_steps=2", ways) == 0
    assert {path: path.read_bytes() for path in before} == before


def test_keys_that_a_finished_run_does_not_use_are_named(
    train_small: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """No step is left to trace, nor one that other implementations would compute."""
    assert train_small("run.max_steps=2") == 0
    capsys.readouterr()
    assert train_small("run.max_steps=2", "run.profile=[2]", "run.force_ops={*: reference}") == 0
    said = capsys.readouterr()
    for key in ("run.profile", "run.force_ops"):
        assert f"{key} has no effect: no step is left to run" in said.out + said.err
    assert "nothing left to do" in said.out


def test_runs_survive_a_clock_that_goes_backwards(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600.0 * next(calls))
    for steps in (1, 2):
        assert train_small(f"run.max_steps={steps}", "run.eval_lengths=[1]", "run.timeout=600") == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]
    assert 0 < outcome_of(tmp_path / "run")["seconds"] < 600


def test_never_resume_starts_from_scratch(train_small: Train, tmp_path: Path) -> None:
    assert train_small("run.max_steps=3") == 0
    assert train_small("run.max_steps=3", "run.resume=never", "run.seed=5") == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3]


def test_another_model_is_refused_with_the_difference(train_small: Train, refused: Refused, tmp_path: Path) -> None:
    assert train_small("run.max_steps=2") == 0
    saved = (tmp_path / "run" / "config.yaml").read_text()
    problem = refused("model.width=64")["model.width"]
    assert problem.code == "changed"
    assert "holds 32" in problem.message
    problems = refused("model.layers.-.hidden=48", "model.layers.M.state=8")
    assert {key: problem.code for key, problem in problems.items() if key.startswith("model.layers.")} == {
        "model.layers.-.hidden": "changed",
        "model.layers.M.state": "changed",
    }
    assert problems["model.layers.-.hidden"].message.startswith("is 48,")
    assert problems["model.layers.M.state"].message.startswith("is 8,")
    assert not any("{" in problem.message for problem in problems.values())
    assert "model.width" in refused("run.max_steps=2", "model.width=64"), "nor where nothing is left to train"
    assert (tmp_path / "run" / "config.yaml").read_text() == saved
    assert outcome_of(tmp_path / "run")["outcome"] == "finished"


def test_the_final_sample_names_the_tokens_per_weight(
    train_small: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = SimpleNamespace(parameters=lambda: iter([torch.zeros(100, 10)]))
    run = SimpleNamespace(sample_prompt="The ", sample_tokens=4)
    monkeypatch.setattr("hybridtron.train.report.sample_text", lambda *_: "The end")
    said = sample_report(model, Path("unused"), run, 20)  # type: ignore[arg-type]
    about = "a sample of 4 tokens after 'The '"
    assert said == f"\n{about} (may be noise: the model has read 20 tokens, 0.02 per weight):\nThe end"
    assert sample_report(model, Path("unused"), run, 1000) == f"\n{about}:\nThe end"  # type: ignore[arg-type]
    assert train_small("run.max_steps=1", "run.sample_tokens=4") == 0
    assert "(may be noise: " in "".join(capsys.readouterr())


@pytest.mark.slow
def test_another_optimizer_is_refused_with_the_difference(train_small: Train, refused: Refused) -> None:
    assert train_small("run.max_steps=2") == 0
    problem = refused("run.max_steps=4", "optim.name=muon")["optim.name"]
    assert problem.code == "changed"
    assert "muon" in problem.message
    assert "adamw" in problem.message


def test_other_data_is_refused_in_the_middle_of_a_phase(train_small: Train, refused: Refused) -> None:
    assert train_small("run.max_steps=2") == 0
    problems = refused("phases.0.seq_len=8", "phases.0.global_batch=8")
    assert {problems[key].code for key in ("seq_len", "global_batch")} == {"changed"}
    assert "is 8, was 16" in problems["seq_len"].message
    assert "is 8, was 4" in problems["global_batch"].message
    cures = " ".join(problem.message for problem in problems.values())
    assert "run.resume=never" in cures
    assert "run.accept_data_changes=true" in cures


@pytest.mark.slow
def test_other_data_is_accepted_on_request(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_small("run.max_steps=2") == 0
    changes = ["phases.0.seq_len=8", "phases.0.global_batch=8", "run.max_steps=4", "run.accept_data_changes=true"]
    assert train_small(changes) == 0
    output = capsys.readouterr().out
    assert "run.accept_data_changes=true" in output
    assert "seq_len is 8, was 16" in output
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert train_small(changes, "run.max_steps=6", "model.width=64") == 2, "another model can't be accepted"


@pytest.mark.slow
def test_another_tokenizer_is_refused_between_phases(
    train_small: Train, refused: Refused, tmp_path: Path, counting_folder: Path
) -> None:
    phase = "{name: NAME, tokens: 128, seq_len: 16, global_batch: 4, lr: 1e-3}"
    phases = f"phases=[{phase.replace('NAME', 'a')},{phase.replace('NAME', 'b')}]"
    assert train_small(phases, "run.max_steps=2") == 0
    other = tmp_path / "other"
    shutil.copytree(counting_folder, other)
    text = (other / "tokenizer.json").read_bytes() + b"\n"
    (other / "tokenizer.json").write_bytes(text)
    manifest = json.loads((other / "manifest.json").read_text())
    before = manifest.pop("tokenizer")
    del manifest["digest"]  # as folders of before have none
    (other / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": digest_of(text)}))
    problem = refused(phases, f"data.path={other}")["tokenizer"]
    assert problem.code == "changed"
    assert f"is {digest_of(text)[:12]}, was {before[:12]}" in problem.message
    assert train_small(phases, f"data.path={other}", "run.accept_data_changes=true") == 0


def test_a_failed_run_records_its_reason(train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("hybridtron.engine.engine.Engine.forward_backward", broken)
    with pytest.raises(RuntimeError):
        train_small()
    expected = {"outcome": "failed", "rank": 0, "step": 0, "reason": "RuntimeError: out of luck"}
    assert ending_of(tmp_path / "run") == expected


@pytest.mark.slow
def test_bf16_runs_learn(train_small: Train, tmp_path: Path) -> None:
    assert train_small("precision=bf16", "phases.0.tokens=8K", "run.eval_every=200") == 0
    assert metrics_of(tmp_path / "run")[-1]["loss"] < 0.6 * math.log(VOCAB)
    checkpoint = checkpoints.all_of(tmp_path / "run")[-1]
    dtypes = {name: str(t.dtype) for name, t in load_file(checkpoint / "model-00000.safetensors").items()}
    assert dtypes["layers.0.mixer.A_log"] == "torch.float32"
    assert dtypes["embedding.weight"] == "torch.bfloat16"


@pytest.mark.slow
def test_two_phases_follow_each_other(train_small: Train, tmp_path: Path, counting_folder: Path) -> None:
    recipe = "phases=[{name: a, tokens: 320, seq_len: 16, global_batch: 4, lr: 1e-3},"
    recipe += "{name: b, tokens: 640, seq_len: 32, global_batch: 2, lr: 1e-4, data: {documents: join}}]"
    assert train_small(recipe, "run.max_steps=7") == 0
    assert train_small(recipe) == 0
    lines = metrics_of(tmp_path / "run")
    assert [line["phase"] for line in lines] == ["a"] * 5 + ["b"] * 10
    assert [line["tokens"] for line in lines][-1] == 960


@pytest.mark.slow
def test_reports_norms_and_traces_when_asked(train_small: Train, tmp_path: Path) -> None:
    assert train_small("run.max_steps=3", "run.layer_norms=true", "run.profile=[2]") == 0
    layers = metrics_of(tmp_path / "run")[1]["layers"]
    assert layers["layers.0.grad_norm"] > 0
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert {"trace-step-00000002-rank-0.json", "memory-step-00000002-rank-0.txt"} <= logs


@pytest.mark.slow
@pytest.mark.parametrize("states", ["mode=tbtt", "mode=passing", "mode=fitted"])
def test_a_phase_with_carried_states_resumes_with_the_same_losses(
    train_small: Train, tmp_path: Path, states: str
) -> None:
    assert train_small(f"states.{states}", f"run.dir={tmp_path / 'whole'}", "run.max_steps=6") == 0
    assert train_small(f"states.{states}", "run.max_steps=3") == 0
    assert train_small(f"states.{states}", "run.max_steps=6") == 0
    whole, parts = ([line["loss"] for line in metrics_of(folder)] for folder in (tmp_path / "whole", tmp_path / "run"))
    assert parts == whole


def test_chunks_of_a_lane_are_one_step(train_small: Train, tmp_path: Path) -> None:
    assert train_small("states.mode=tbtt", "states.chunks=2", "run.max_steps=3") == 0
    assert [line["tokens"] for line in metrics_of(tmp_path / "run")] == [64, 128, 192]


def test_weight_decay_follows_the_learning_rate(train_small: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    step = Engine.step

    def recorded(engine: Engine, lr: float, weight_decay: float, numbers: Sequence[float]) -> tuple[float, bool]:
        taken.append((lr, weight_decay))
        return step(engine, lr, weight_decay, numbers)

    monkeypatch.setattr(Engine, "step", recorded)
    settings = ("phases.0.lr=2e-3", "optim.weight_decay=0.5", "optim.weight_decay_schedule=lr")
    assert train_small(settings, "run.max_steps=3", "run.eval_lengths=[1]") == 0
    assert [decay for _, decay in taken] == pytest.approx([lr * 250 for lr, _ in taken])


def test_skipped_steps_are_counted_and_change_nothing(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_backward = Engine.forward_backward
    calls = []

    def poisoned(engine: Engine, batches: list[Batch], step: int) -> StepLoss:
        loss = forward_backward(engine, batches, step)
        calls.append(1)
        if len(calls) == 2:
            engine.optimizer.shards["norm.weight"].weight.main_grad[0] = float("nan")
        return loss

    monkeypatch.setattr(Engine, "forward_backward", poisoned)
    assert train_small("run.max_steps=3") == 0
    assert [line["skipped"] for line in metrics_of(tmp_path / "run")] == [0, 1, 1]
    newest = checkpoints.newest(tmp_path / "run")
    assert newest is not None
    assert newest.meta.accepted_steps == 2


@pytest.mark.parametrize(
    ("argument", "key", "code"),
    [
        ("model.pattern=(M-Wz)", "model.pattern", "malformed"),
        ("model.layers.M.kind=mambo", "model.layers.M.kind", "unknown-name"),
        ("model.layers.M.stat=3", "model.layers.M.stat", "unknown-name"),
        ("phases.0.micro_batch=3", "phases.0.micro_batch", "not-divisible"),
        ("data.path=/no/such/folder", "data.path", "no-file"),
        ("model.vocab_size=16", "data.path", "mismatch"),
        ("model.layers.W.window=4096", "model.layers.W.window", "out-of-range"),
        ("optim.schedul=wsd", "optim.schedul", "unknown-name"),
    ],
)
def test_a_wrong_setting_is_refused_and_nothing_is_written(
    refused: Refused, tmp_path: Path, argument: str, key: str, code: Code
) -> None:
    assert refused(argument)[key].code == code
    assert not (tmp_path / "run").exists()


def test_weights_of_another_vocabulary_are_refused(refused: Refused, tmp_path: Path, counting_folder: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    tokenizer = json.loads((counting_folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: len(vocabulary) - 1 - number for token, number in vocabulary.items()}
    (weights / "tokenizer.json").write_text(json.dumps(tokenizer))
    (weights / "config.yaml").write_text(to_yaml(load([])))
    assert refused(f"run.weights={weights}")["run.weights"].code == "mismatch"
    assert not (tmp_path / "run").exists()


def test_full_disk_leaves_the_stored_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["recipe=laptop", f"run.dir={tmp_path / 'run'}"])
    open_run_folder(config)
    stored = (tmp_path / "run" / "config.yaml").read_text()
    write_text = Path.write_text

    def write_half(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(ConfigError):
        open_run_folder(config)
    assert (tmp_path / "run" / "config.yaml").read_text() == stored


def test_supervisor_hears_of_the_search_for_a_checkpoint(tmp_path: Path, alone: Groups) -> None:
    plan = RunPlan.of(load(small_run_arguments(tmp_path / "data", tmp_path / "run")))
    reading, writing = os.pipe()
    before = signal.getsignal(STACKS)
    try:
        assert find_start(plan, alone, SectionPipe({VARIABLE: str(writing)})) is None
        assert os.read(reading, 4096) == b"start 0 the search for a checkpoint\n"
        assert signal.getsignal(STACKS) == signal.SIG_IGN
    finally:
        signal.signal(STACKS, before)
        os.close(reading)
        os.close(writing)
