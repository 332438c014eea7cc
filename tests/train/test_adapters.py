"""Phases with adapters: trained weights, weights that keep their bits, and adapters from phase to phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.adapters import is_adapter
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.cli import train
from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate.loaded_model import whole_model
from hybridtron.problems import Code
from tests.train.conftest import VOCAB, Refused, Train, small_run_arguments

SIZES = "tokens: 256, seq_len: 16, global_batch: 4, micro_batch: 2, lr: 1e-2"  # four steps
BESIDE = "preset: hylora, rank: 2, alpha: 4, weights: [layers.*.mixer.kv.weight.v, layers.*.mixer.out.weight]"
PHASES = (
    f"phases=[{{name: base, {SIZES}}}, {{name: tune, {SIZES}, adapters: {{{BESIDE}}}}},"
    f"{{name: on, {SIZES}, adapters: {{{BESIDE}, dropout: 0.2}}, precision: {{name: bf16}}}},"
    f"{{name: again, {SIZES}, adapters: {{{BESIDE}, restart: true, dora: true}}}}, {{name: whole, {SIZES}}}]"
)


def opened(run: Path, step: int) -> Checkpoint:
    return Checkpoint.open(folder_of(run, step))


def tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {key: checkpoint.whole(key) for key in checkpoint.shapes}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all phases without a stop."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    kept = ["checkpoint.every=1", "checkpoint.keep=30"]
    assert train.main([*small_run_arguments(counting_folder, run), PHASES, *kept]) == 0
    return run


@pytest.mark.slow
def test_frozen_weights_keep_their_bits_and_have_no_moments(run: Path) -> None:
    before = tensors(opened(run, 4))
    after = tensors(opened(run, 8))
    weights = {key for key in after if key.startswith(("layers.", "embedding.", "norm."))}
    learned = {key for key in weights if is_adapter(key) or "conv" in key or "norm" in key or "embedding" in key}
    assert {key for key in weights if is_adapter(key)} == {
        f"layers.{layer}.mixer.{name}"
        for layer in (2, 6)
        for name in ("kv.adapter.A.v", "kv.adapter.B.v", "out.adapter.A", "out.adapter.B")
    }
    assert {key for key in weights if key not in before or not torch.equal(after[key], before[key])} == learned
    assert {key for key in after if key.startswith("exp_avg.")} == {f"exp_avg.{key}" for key in learned}


@pytest.mark.slow
def test_merged_weights_compute_the_same_as_adapters(run: Path) -> None:
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with_adapters = opened(run, 8)
    without = merge_adapters(opened(run, 8))
    logits, merged_logits = (
        whole_model(checkpoint, checkpoint.plan.arch)(tokens, None, SeqInfo.stream(2, 16)).output
        for checkpoint in (with_adapters, without)
    )
    torch.testing.assert_close(logits, merged_logits, rtol=1e-5, atol=1e-5)
    assert any(is_adapter(key) for key in with_adapters.shapes)
    assert not any(is_adapter(key) for key in without.shapes)


def test_a_phase_with_the_same_adapters_continues_them(run: Path) -> None:
    before = opened(run, 8)
    after = opened(run, 12)
    for key in (key for key in before.shapes if is_adapter(key) and key.startswith("layers.")):
        step = (after.whole(f"master.{key}") - before.whole(key)).abs().max()
        assert 0 < step < 0.05, key  # four steps at 1e-2, which does not hold where A starts from the seed
    assert torch.equal(after.whole("layers.2.mixer.kv.weight.v"), before.whole("layers.2.mixer.kv.weight.v").bfloat16())


def test_adapters_are_merged_at_the_end_of_their_phase(run: Path) -> None:
    before = opened(run, 12)
    restart = opened(run, 13)
    after = opened(run, 17)
    key = "layers.2.mixer.kv.weight.v"
    A, B = (before.whole(f"master.layers.2.mixer.kv.adapter.{piece}.v") for piece in "AB")
    expected = before.whole(key).float() + 2.0 * B @ A
    torch.testing.assert_close(restart.whole(key), expected)
    for piece in "BM":
        assert 0 < restart.whole(f"layers.2.mixer.kv.adapter.{piece}.v").abs().max() < 0.011  # one step from zero
    assert not any(is_adapter(name) for name in after.shapes)
    torch.testing.assert_close(after.whole(key), merge_adapters(opened(run, 16)).whole(key), rtol=0, atol=0.011)


@pytest.mark.slow
def test_interrupted_adapter_runs_end_like_uninterrupted_ones(train_small: Train, tmp_path: Path, run: Path) -> None:
    for step in (4, 6, 8, 12, 14, 16, 20):
        assert train_small(PHASES, f"run.max_steps={step}") == 0
    assert losses(tmp_path / "run") == losses(run)
    kept = tensors(opened(tmp_path / "run", 20))
    expected = tensors(opened(run, 20))
    assert kept.keys() == expected.keys()
    assert [key for key in kept if not torch.equal(kept[key], expected[key])] == []


@pytest.mark.parametrize("adapters", [f"{{{BESIDE}}}", "null"])
def test_runs_start_from_weights_with_merged_adapters(
    train_small: Train, tmp_path: Path, run: Path, adapters: str
) -> None:
    checkpoint = folder_of(run, 8)
    assert train_small(f"run.weights={checkpoint}", f"phases.0.adapters={adapters}", "run.max_steps=1") == 0
    # by one step, unless frozen
    key = "layers.2.mixer.kv.weight.v"
    moved = 0.0 if "preset" in adapters else 0.011
    started = opened(tmp_path / "run", 1).whole(key)
    expected = merge_adapters(opened(run, 8)).whole(key)
    torch.testing.assert_close(started, expected, rtol=0, atol=moved)


@pytest.mark.parametrize(
    ("adapters", "key", "code", "named"),
    [
        ("phases.0.adapters.weights=[layers.*.mixer.qq.weight]", "weights", "unknown-name", "layers.*.mixer.q.weight"),
        ("phases.0.adapters.weights=[layers.*.mixer.conv_weight]", "weights", "unknown-name", "mixer.kv.weight.k"),
        ("phases.0.adapters.weights=[]", "weights", "missing", "mixer.q.weight"),
        ("phases.0.adapters.rank=0", "rank", "out-of-range", "1"),
        ("phases.0.adapters.presett=lora", "presett", "unknown-name", "preset"),
        ("phases.0.adapters.dropout=1", "dropout", "out-of-range", "0.05"),
        (
            "phases.0={adapters: {dropout: 0.1}, seq_len: 16, micro_batch: 16, global_batch: 16}",
            *("dropout", "unsupported", "micro_batch"),
        ),
    ],
)
def test_impossible_adapters_are_refused(refused: Refused, adapters: str, key: str, code: Code, named: str) -> None:
    problem = refused(adapters)[f"phases.0.adapters.{key}"]
    assert problem.code == code
    assert named in problem.message
