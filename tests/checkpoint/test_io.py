"""Checkpoints: everything comes back, fused weights are stored by parts, a folder appears whole or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.checkpoint import io
from hybridtron.config.schema import CheckpointConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch, small_run


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


def trained(groups: Groups, precision: str = "fp32") -> Engine:
    engine = Engine(small_run(precision=precision), groups)
    for _ in range(2):
        engine.forward_backward([random_batch()])
        engine.optimizer.step(1e-2)
    return engine


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_everything_comes_back(alone: Groups, tmp_path: Path, tokenizer: Path, precision: str) -> None:
    engine = trained(alone, precision)
    saved = io.save(tmp_path, 7, engine.config, engine, {"seed": "3"}, tokenizer)
    drawn = torch.rand(3)
    other = Engine(engine.config, alone, io.stored(saved, "model.safetensors", engine.optimizer.table))
    meta = io.restore_optimizer(saved, other)
    assert torch.equal(torch.rand(3), drawn)
    assert (meta.step, meta.accepted_steps, meta.data) == (7, 2, {"seed": "3"})
    weights, state = dict(other.weights()), dict(other.optimizer.state())
    assert all(torch.equal(weights[name], weight) for name, weight in engine.weights())
    assert all(torch.equal(state[name], tensor) for name, tensor in engine.optimizer.state())
    assert io.read_config(saved) == engine.config
    batch = random_batch()
    for each in (engine, other):
        each.forward_backward([batch])
        each.optimizer.step(1e-2)
    weights = dict(other.weights())
    assert all(torch.equal(weights[name], weight) for name, weight in engine.weights())


def test_fused_projections_are_stored_by_their_parts(alone: Groups, tmp_path: Path, tokenizer: Path) -> None:
    engine = trained(alone)
    stored = load_file(io.save(tmp_path, 1, engine.config, engine, {}, tokenizer) / "model.safetensors")
    assert "layers.0.mixer.in_proj.weight" not in stored
    in_proj = dict(engine.weights())["layers.0.mixer.in_proj.weight"]
    assert torch.equal(stored["layers.0.mixer.in_proj.weight.z"], in_proj[64:])
    assert {"layers.2.mixer.kv.weight.k", "layers.1.mixer.gate_up.weight.up"} <= set(stored)


def test_keeps_as_many_as_asked(alone: Groups, tmp_path: Path, tokenizer: Path) -> None:
    engine = trained(alone)
    config = dataclasses.replace(engine.config, checkpoint=CheckpointConfig(keep=2))
    for step in (1, 2, 10):
        io.save(tmp_path, step, config, engine, {}, tokenizer)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000010"]
    assert io.newest(tmp_path) == io.folder_of(tmp_path, 10)


def test_a_save_that_fails_leaves_no_checkpoint(
    alone: Groups, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(alone)
    io.save(tmp_path, 1, engine.config, engine, {}, tokenizer)
    monkeypatch.setattr(io, "_flush", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        io.save(tmp_path, 2, engine.config, engine, {}, tokenizer)
    assert io.newest(tmp_path) == io.folder_of(tmp_path, 1)


def test_another_format_is_refused(alone: Groups, tmp_path: Path, tokenizer: Path) -> None:
    engine = trained(alone)
    saved = io.save(tmp_path, 1, engine.config, engine, {}, tokenizer)
    meta = saved / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(ValueError, match="checkpoint format 99; this version reads 2"):
        io.read_meta(saved)
