"""Runs with `run.weights` of a run in bf16: they start from its fp32 masters, not from its rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.average import weight_shapes
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from tests.train.conftest import Refused, Train, small_run_arguments
from tests.train.test_stop_and_resume import run

BF16 = "precision=bf16"
UNMOVED = ("phases.0.lr=1e-30", "optim.final_lr=1", "run.max_steps=1")  # a step that changes no weight


@pytest.fixture
def base(train_small: Train, tmp_path: Path) -> Path:
    assert train_small(BF16, "run.max_steps=4") == 0
    return tmp_path / "run"


def masters(folder: Path, step: int) -> dict[str, Tensor]:
    """Return all weights of a checkpoint, unrounded."""
    checkpoint = Checkpoint.open(folder_of(folder, step))
    return {key: checkpoint.whole(checkpoint.widest(key)) for key in weight_shapes(checkpoint)}


def assert_same(folder: Path, base: Path) -> None:
    """Compare the weights of a run's first step with those of the base, which must not all be bf16 numbers."""
    expected = masters(base, 4)
    assert not torch.equal(expected["embedding.weight"], expected["embedding.weight"].bfloat16().float())
    started = masters(folder, 1)
    assert started.keys() == expected.keys()
    assert [key for key, value in started.items() if not torch.equal(value, expected[key])] == []


@pytest.mark.parametrize("settings", [BF16, "precision=fp32", [BF16, "parallel.distributed_optimizer=false"]])
def test_run_starts_from_the_masters(settings: str | list[str], base: Path, train_small: Train, tmp_path: Path) -> None:
    started = tmp_path / "started"
    assert train_small(settings, f"run.weights={base}", f"run.dir={started}", *UNMOVED) == 0
    assert_same(started, base)


def test_moving_average_starts_from_the_masters(base: Path, train_small: Train, tmp_path: Path) -> None:
    started = tmp_path / "started"
    assert train_small(BF16, "run.ema=0.9", f"run.weights={base}", f"run.dir={started}", *UNMOVED) == 0
    checkpoint = Checkpoint.open(folder_of(started, 1))
    for key, master in masters(base, 4).items():
        assert torch.equal(checkpoint.whole(f"ema.{key}"), master)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [BF16, "precision=fp32"])
def test_run_starts_from_unrounded_merged_weights(
    precision: str, base: Path, train_small: Train, tmp_path: Path
) -> None:
    """The weight W is stored in bf16, but the new run starts from W + (alpha / rank) B A in fp32."""
    adapted = tmp_path / "adapted"
    adapters = "model.adapters={preset: lora, weights: [layers.*.mixer.q.weight], rank: 2, alpha: 4}"
    assert train_small(BF16, f"run.weights={base}", f"run.dir={adapted}", adapters, "run.max_steps=2") == 0
    started = tmp_path / "started"
    assert train_small(precision, f"run.weights={adapted}", f"run.dir={started}", *UNMOVED) == 0
    source = Checkpoint.open(folder_of(adapted, 2))
    weights = masters(started, 1)
    merged = [key for key in weights if key.endswith("mixer.q.weight")]
    assert merged
    for key in merged:
        stem = key.removesuffix(".weight")
        A = source.whole(f"master.{stem}.adapter.A")
        B = source.whole(f"master.{stem}.adapter.B")
        expected = source.whole(key).float() + 2.0 * B @ A
        assert not torch.equal(expected, expected.bfloat16().float())
        torch.testing.assert_close(weights[key], expected, rtol=1e-6, atol=1e-8)


def test_damaged_master_is_refused(base: Path, refused: Refused, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder_of(base, 4))
    chunk = next(entry for entry in checkpoint.manifest.chunks if entry.key == "master.embedding.weight")
    file = checkpoint.folder / chunk.file
    stored = bytearray(file.read_bytes())
    start = stored.find(checkpoint.whole(chunk.key).numpy().tobytes())
    assert start > 0
    stored[start] ^= 1
    file.write_bytes(stored)
    weights = f"run.weights={checkpoint.folder}"
    assert refused(BF16, weights, f"run.dir={tmp_path / 'started'}")["run.weights"].code == "unreadable"


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_ranks_start_from_their_shards_of_the_masters(base: Path, counting_folder: Path, tmp_path: Path) -> None:
    for layout in ("tp2", "pp2", "dp2"):
        started = tmp_path / layout
        run(layout, [*small_run_arguments(counting_folder, started), BF16, f"run.weights={base}", *UNMOVED])
        assert_same(started, base)
