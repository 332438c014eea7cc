"""A tiny checkpoint is post-trained by every length recipe; weights come from where run.weights says, and only they."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import train
from hybridtron.config.load import choices_of
from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel
from tests.settings import Setting, flat
from tests.slow import slow_except
from tests.train.conftest import VOCAB, Refused, Train

RECIPES = [name for name in choices_of("recipe") if re.match("length/(?!official_)", name)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, counting_folder: Path) -> Path:
    """A Mamba-2 after four steps."""
    run = tmp_path_factory.mktemp("runs") / "base"
    arguments = [
        "recipe=mamba2_45m", "precision=fp32", f"data.path={counting_folder}", f"run.dir={run}", "model.width=32",
        f"model.vocab_size={VOCAB}", "model.pattern=M*2", "model.layers.M.state=4", "model.layers.M.head_dim=16",
        "phases.0.seq_len=16", "phases.0.global_batch=4", "phases.0.micro_batch=2", "phases.0.tokens=256",
        "run.eval_tokens=64", "cluster=local",
    ]  # fmt: skip
    assert train.main(arguments) == 0
    return run


def post_train(base: Path, run: Path, *settings: Setting) -> int:
    fixed = ["phases.0.tokens=${steps:2}", "run.eval_tokens=64", f"run.weights={base}", f"run.dir={run}"]
    return train.main([*fixed, *flat(settings)])


def tensors(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return a checkpoint's tensors whose key begins with this prefix."""
    opened = Checkpoint.open(checkpoint)
    return {key: opened.whole(key) for key in opened.shapes if key.startswith(prefix)}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the model's own weights from a checkpoint."""
    return tensors(checkpoint, "embedding.") | tensors(checkpoint, "layers.") | tensors(checkpoint, "norm.")


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return (
        len(first) > 10 and first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    )


@pytest.mark.parametrize("recipe", slow_except(RECIPES, RECIPES[0]))
def test_every_recipe_post_trains_a_checkpoint(recipe: str, base: Path, tmp_path: Path) -> None:
    assert post_train(base, tmp_path / "run", f"recipe={recipe}") == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2
    assert last["lr"] == pytest.approx(1e-5)  # where the cosine ends
    assert (
        Checkpoint.open(folder_of(tmp_path / "run", 2)).config.model == Checkpoint.open(folder_of(base, 4)).config.model
    )


@pytest.mark.parametrize("of_run", [True, False])
def test_post_training_starts_from_weights_only(of_run: bool, base: Path, tmp_path: Path) -> None:
    """With a learning rate of zero it ends on them; the step and the optimizer are new."""
    held = folder_of(base, 4)
    arguments = ["recipe=length/zero", "phases.0.lr=1e-30", "optim.final_lr=1"]
    assert post_train(base if of_run else held, tmp_path / "run", arguments) == 0
    ended = folder_of(tmp_path / "run", 2)
    assert same(weights(held), weights(ended))
    assert Checkpoint.open(ended).meta.accepted_steps == 2
    moments = [tensors(checkpoint, "exp_avg.") for checkpoint in (held, ended)]
    assert moments[0]
    assert not any(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])


def test_a_run_can_start_from_the_lowest_held_out_loss(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate that is far too large makes the last step's checkpoint a worse one than those before it."""
    often = ["run.eval_every=1", "checkpoint.every=1", "checkpoint.keep=5", "optim.spike=null", "optim.warmup=0"]
    sizes = "seq_len: 16, global_batch: 4, micro_batch: 4"
    phases = f"phases=[{{name: a, tokens: 128, lr: 1e-2, {sizes}}}, {{name: b, tokens: 64, lr: 1.0, {sizes}}}]"
    assert train_small(phases, often) == 0
    written = [Checkpoint.open(folder_of(tmp_path / "run", step)) for step in (1, 2, 3)]
    least = min(written, key=lambda checkpoint: checkpoint.meta.validation or math.inf)
    assert least.meta.step < 3
    arguments = [f"run.weights={tmp_path / 'run'}@best", f"run.dir={tmp_path / 'after'}", "run.max_steps=1"]
    assert train_small(arguments, "phases.0.lr=1e-30", "optim.final_lr=1") == 0
    assert f"initial weights: {least.folder}, held-out loss {least.meta.validation:.4f}" in capsys.readouterr().out
    assert same(weights(least.folder), weights(folder_of(tmp_path / "after", 1)))


def test_a_run_without_held_out_losses_has_no_best_checkpoint(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.yaml").write_text((base / "config.yaml").read_text())
    assert post_train(Path(f"{empty}@best"), tmp_path / "run", "recipe=length/zero") == 2
    message = capsys.readouterr().err
    assert f"run.weights  {empty} " in message
    assert "held-out loss" in message


@pytest.mark.slow
def test_post_training_resumes_from_its_checkpoints(base: Path, tmp_path: Path) -> None:
    """Stopped in between and started again, it ends as the one that ran through."""
    for run, stops in ((tmp_path / "through", [4]), (tmp_path / "again", [2, 4])):
        for stop in stops:
            arguments = ["recipe=length/state_passing", "phases.0.tokens=${steps:4}", f"run.max_steps={stop}"]
            assert post_train(base, run, arguments) == 0
    assert same(*(weights(folder_of(tmp_path / name, 4)) for name in ("through", "again")))


def test_post_training_refuses_another_model(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert post_train(base, tmp_path / "run", "recipe=length/zero", "model.width=64") == 2
    message = capsys.readouterr().err
    assert "model.width  is 64," in message
    assert "holds 32" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_attention_becomes_span_attention(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every weight is loaded, and its new use is reported."""
    assert train_small("run.max_steps=2") == 0
    span = ["model.pattern=(M-X-)*2", "model.layers.X={kind: span, heads: 4, chunk: 8, block: 4, blocks: 1}"]
    arguments = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'span'}", "run.max_steps=1", *span]
    assert train_small(arguments, "phases.0.lr=1e-30", "optim.final_lr=1") == 0
    assert "model.pattern is '(M-X-)*2'" in capsys.readouterr().out
    assert same(*(weights(folder_of(tmp_path / name, step)) for name, step in (("run", 2), ("span", 1))))


@pytest.mark.slow
def test_a_sparse_branch_is_grown_beside_loaded_weights(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New weights are named and start as they should; while the gate is 0 the logits are the same bit for bit."""
    assert train_small("run.max_steps=2") == 0
    sparse = "model.layers.M={kind: mamba, state: 4, sparse: {keys: 4, hashes: 3}}"
    arguments = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'grown'}", "run.max_steps=1", sparse]
    assert train_small(arguments, "optim.hold=100%", "optim.warmup=0") == 0
    lines = capsys.readouterr().out.splitlines()
    for weight, start in (("sparse.gate", "Constant(value=0.0)"), ("sparse_qk.weight", "x_proj.weight.C")):
        (line,) = [line for line in lines if f".{weight} is new " in line]
        assert "0, 4" in line
        assert start in line
    before, after = (Checkpoint.open(folder_of(tmp_path / name, step)) for name, step in (("run", 2), ("grown", 1)))
    held = weights(before.folder)
    grown = weights(after.folder)
    assert same(held, {key: grown[key] for key in held})
    for ours, theirs in (("k", "B"), ("q", "C")):
        assert torch.equal(
            grown[f"layers.4.mixer.sparse_qk.weight.{ours}"], held[f"layers.4.mixer.x_proj.weight.{theirs}"]
        )
    assert not any(grown[f"layers.{layer}.mixer.sparse.gate"].any() for layer in (0, 4))
    logits = []
    for checkpoint in (before, after):
        model = LanguageModel(architecture(checkpoint.config.model))
        checkpoint.load_weights(model)
        logits.append(model(torch.arange(48).view(2, 24) % VOCAB, None, SeqInfo.stream(2, 24)).output)
    held_logits, grown_logits = logits
    assert torch.equal(grown_logits, held_logits)


def test_only_optional_weights_are_grown(train_small: Train, refused: Refused, tmp_path: Path) -> None:
    assert train_small("run.max_steps=1") == 0
    problems = refused(f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'longer'}", "model.pattern=(M-W-)*3")
    assert problems["model.pattern"].code == "mismatch"


def test_weights_of_a_run_without_checkpoints_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.yaml").write_text((base / "config.yaml").read_text())
    assert post_train(empty, tmp_path / "run", "recipe=length/zero") == 2
    assert f"run.weights  {empty} has no valid checkpoint" in capsys.readouterr().err
