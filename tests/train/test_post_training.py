"""A tiny checkpoint is post-trained by every length recipe; weights come from where run.weights says, and only they."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import train
from hybridtron.config.load import choices_of
from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel
from tests.train.conftest import VOCAB, Train

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


def post_train(base: Path, run: Path, *arguments: str) -> int:
    fixed = ["phases.0.tokens=${steps:2}", "run.eval_tokens=64", f"run.weights={base}", f"run.dir={run}"]
    return train.main([*fixed, *arguments])


def tensors(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return a checkpoint's tensors whose key begins with this prefix."""
    opened = Checkpoint.open(checkpoint)
    return {key: opened.whole(key) for key in opened.shapes if key.startswith(prefix)}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the model's own weights from a checkpoint."""
    return tensors(checkpoint, "embedding.") | tensors(checkpoint, "layers.") | tensors(checkpoint, "norm.")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return len(one) > 10 and one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_post_trains_a_checkpoint(recipe: str, base: Path, tmp_path: Path) -> None:
    assert post_train(base, tmp_path / "run", f"recipe={recipe}") == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2
    assert last["lr"] == pytest.approx(1e-5)  # where the cosine ends
    assert (
        Checkpoint.open(folder_of(tmp_path / "run", 2)).config.model == Checkpoint.open(folder_of(base, 4)).config.model
    )


@pytest.mark.parametrize("of_run", [True, False])
def test_the_run_starts_from_the_weights_alone(of_run: bool, base: Path, tmp_path: Path) -> None:
    """With a learning rate of zero it ends on them; the step and the optimizer are new."""
    held = folder_of(base, 4)
    arguments = ["recipe=length/zero", "phases.0.lr=1e-30", "optim.final_lr=1"]
    assert post_train(base if of_run else held, tmp_path / "run", *arguments) == 0
    found = folder_of(tmp_path / "run", 2)
    assert same(weights(held), weights(found))
    assert Checkpoint.open(found).meta.accepted_steps == 2
    moments = [tensors(one, "exp_avg.") for one in (held, found)]
    assert moments[0]
    assert not any(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])


def test_a_run_can_start_from_the_lowest_held_out_loss(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate that is far too large makes the last step's checkpoint a worse one than those before it."""
    often = ["run.eval_every=1", "checkpoint.every=1", "checkpoint.keep=5", "optim.spike=null", "optim.warmup=0"]
    sizes = "seq_len: 16, global_batch: 4, micro_batch: 4"
    phases = f"phases=[{{name: a, tokens: 128, lr: 1e-2, {sizes}}}, {{name: b, tokens: 64, lr: 1.0, {sizes}}}]"
    assert train_small(phases, *often) == 0
    written = [Checkpoint.open(folder_of(tmp_path / "run", step)) for step in (1, 2, 3)]
    least = min(written, key=lambda one: one.meta.validation or math.inf)
    assert least.meta.step < 3
    arguments = [f"run.weights={tmp_path / 'run'}@best", f"run.dir={tmp_path / 'after'}", "run.max_steps=1"]
    assert train_small(*arguments, "phases.0.lr=1e-30", "optim.final_lr=1") == 0
    assert f"weights of {least.folder}, held-out loss {least.meta.validation:.4f}" in capsys.readouterr().out
    assert same(weights(least.folder), weights(folder_of(tmp_path / "after", 1)))


def test_a_run_without_held_out_losses_has_no_best_checkpoint(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.yaml").write_text((base / "config.yaml").read_text())
    assert post_train(Path(f"{empty}@best"), tmp_path / "run", "recipe=length/zero") == 2
    assert f"run.weights  {empty} has no checkpoint with a held-out loss" in capsys.readouterr().err


def test_a_run_that_has_a_checkpoint_resumes_from_it(base: Path, tmp_path: Path) -> None:
    """Stopped in between and started again, it ends as the one that ran through."""
    for run, stops in ((tmp_path / "through", [4]), (tmp_path / "again", [2, 4])):
        for stop in stops:
            arguments = ["recipe=length/state_passing", "phases.0.tokens=${steps:4}", f"run.max_steps={stop}"]
            assert post_train(base, run, *arguments) == 0
    assert same(*(weights(folder_of(tmp_path / name, 4)) for name in ("through", "again")))


def test_another_model_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert post_train(base, tmp_path / "run", "recipe=length/zero", "model.width=64") == 2
    output = capsys.readouterr().err
    assert "model.width  is 64, but" in output
    assert "holds 32: set it so, or name another run.weights" in output
    assert not (tmp_path / "run").exists()


def test_attention_becomes_span_attention(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every weight is loaded, and its new use is reported."""
    assert train_small("run.max_steps=2") == 0
    span = ["model.pattern=(M-X-)*2", "model.layers.X={kind: span, heads: 4, chunk: 8, block: 4, blocks: 1}"]
    arguments = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'span'}", "run.max_steps=1", *span]
    assert train_small(*arguments, "phases.0.lr=1e-30", "optim.final_lr=1") == 0
    assert "weights of another use: model.pattern is '(M-X-)*2', but " in capsys.readouterr().out
    assert same(*(weights(folder_of(tmp_path / name, step)) for name, step in (("run", 2), ("span", 1))))


def test_a_branch_is_grown_beside_given_weights(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New weights are named and start as they should; while the gate is 0 the logits are the same bit for bit."""
    assert train_small("run.max_steps=2") == 0
    sparse = "model.layers.M={kind: mamba, state: 4, sparse: {keys: 4, hashes: 3}}"
    arguments = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'grown'}", "run.max_steps=1", sparse]
    assert train_small(*arguments, "optim.hold=100%", "optim.warmup=0") == 0
    said = capsys.readouterr().out
    assert "sparse.gate is new in layers 0, 4 and starts as Constant(value=0.0)" in said
    assert "sparse_qk.weight is new in layers 0, 4 and starts as a copy of x_proj.weight.B and x_proj.weight.C" in said
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
    for one in (before, after):
        model = LanguageModel(one.config.model)
        one.load_weights(model)
        logits.append(model(torch.arange(48).view(2, 24) % VOCAB, None, SeqInfo.stream(2, 24)).output)
    assert torch.equal(*logits)


def test_only_weights_that_a_model_can_be_without_are_grown(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_small("run.max_steps=1") == 0
    arguments = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'longer'}"]
    assert train_small(*arguments, "model.pattern=(M-W-)*3") == 2
    assert "model.pattern  is '(M-W-)*3', but" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.yaml").write_text((base / "config.yaml").read_text())
    assert post_train(empty, tmp_path / "run", "recipe=length/zero") == 2
    assert f"run.weights  {empty} has no checkpoint" in capsys.readouterr().err
