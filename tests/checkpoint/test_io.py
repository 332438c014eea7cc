"""Checkpoints: everything comes back, fused weights are stored by parts, a folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.checkpoint import io
from hybridtron.config.schema import CheckpointConfig, Config, DataConfig, OptimConfig, PhaseConfig, RunConfig
from hybridtron.engine.optim import Optimizer
from hybridtron.engine.schedule import forward_backward
from hybridtron.model.lm import LanguageModel
from tests.conftest import random_batch, small_config, small_model


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


def config(keep: int = 2) -> Config:
    phase = PhaseConfig(tokens="1M", seq_len=8, global_batch=1, lr=1e-3)
    run = RunConfig(name="test", dir="unused")
    return Config(
        model=small_config(),
        data=DataConfig(path="unused"),
        checkpoint=CheckpointConfig(keep=keep),
        run=run,
        phases=[phase],
    )


def trained(dtype: torch.dtype) -> tuple[LanguageModel, Optimizer]:
    model = small_model().cast(dtype)
    optimizer = Optimizer(model, OptimConfig())
    for _ in range(2):
        forward_backward(model, [random_batch()], 0.0, torch.device("cpu"))
        optimizer.step(1e-2)
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_comes_back(tmp_path: Path, tokenizer: Path, dtype: torch.dtype) -> None:
    model, optimizer = trained(dtype)
    saved = io.save(tmp_path, 7, config(), model, optimizer, "abc", tokenizer)
    drawn = torch.rand(3)
    other = small_model("M-W-F").cast(dtype)
    restored = Optimizer(other, OptimConfig())
    meta = io.restore(saved, other, restored)
    assert torch.equal(torch.rand(3), drawn)
    assert (meta.step, meta.accepted_steps, meta.data_fingerprint) == (7, 2, "abc")
    for name, weight in model.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], weight), name
        assert torch.equal(restored.masters[name], optimizer.masters[name]), name
    for kind, tensors in optimizer.state().items():
        assert all(torch.equal(restored.state()[kind][name], tensor) for name, tensor in tensors.items())
    assert io.read_config(saved) == config()


def test_fused_projections_are_stored_by_their_parts(tmp_path: Path, tokenizer: Path) -> None:
    model, optimizer = trained(torch.float32)
    stored = load_file(io.save(tmp_path, 1, config(), model, optimizer, "", tokenizer) / "model.safetensors")
    assert "layers.0.mixer.in_proj.weight" not in stored
    in_proj = model.get_parameter("layers.0.mixer.in_proj.weight")
    assert torch.equal(stored["layers.0.mixer.in_proj.weight.z"], in_proj[64:])
    assert {"layers.2.mixer.kv.weight.k", "layers.1.mixer.gate_up.weight.up"} <= set(stored)


def test_keeps_as_many_as_asked(tmp_path: Path, tokenizer: Path) -> None:
    model, optimizer = trained(torch.float32)
    for step in (1, 2, 10):
        io.save(tmp_path, step, config(keep=2), model, optimizer, "", tokenizer)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000010"]
    assert io.newest(tmp_path) == io.folder_of(tmp_path, 10)


def test_a_save_that_fails_leaves_no_checkpoint(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(torch.float32)
    io.save(tmp_path, 1, config(), model, optimizer, "", tokenizer)
    monkeypatch.setattr(io, "_flush", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        io.save(tmp_path, 2, config(), model, optimizer, "", tokenizer)
    assert io.newest(tmp_path) == io.folder_of(tmp_path, 1)


def test_another_format_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    model, optimizer = trained(torch.float32)
    saved = io.save(tmp_path, 1, config(), model, optimizer, "", tokenizer)
    meta = saved / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="checkpoint format 99; this version reads 1"):
        io.read_meta(saved)
