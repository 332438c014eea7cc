"""Adapters that are merged into the weights, from a checkpoint whose tensors several ranks have written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.adapters import adapter_key
from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.blocks import block, full_rectangle
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import ADAPTERS, Layout, small, small_model
from tests.distributed import run_distributed


def saved(seat: Seat, config: Config, folder: Path) -> None:
    """Take a step, so that no adapter is zero, and write a checkpoint."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        engine.forward_backward(micro_batches(engine.phase))
        assert engine.step(1e-2)[1]
        tokenizer = folder.with_suffix(".json")
        if groups.is_first:
            tokenizer.write_text("{}")
        Saver(RunPlan.of(config), folder, groups).save(engine, meta_of(engine, 1, {}), tokenizer)


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_adapters_of_two_ranks_are_merged(tmp_path: Path) -> None:
    layout = Layout(tensor=2)
    model = replace(small_model("M-WS", tied=True, heads={}), adapters=ADAPTERS)
    config = small(model, layout.on(ParallelConfig()), Documents.isolate, data=1)
    run_distributed(saved, layout.world_size, config, tmp_path / "run")
    checkpoint = next(iter(valid_checkpoints(tmp_path / "run")))
    merged = merge_adapters(checkpoint)
    assert not any("adapter" in key for key in merged.shapes)
    for key in ("layers.0.mixer.out_proj.weight", "layers.1.mixer.gate_up.weight.up", "layers.2.mixer.q.weight"):
        A = checkpoint.whole(adapter_key(key, "A"))
        B = checkpoint.whole(adapter_key(key, "B"))
        weight = checkpoint.whole(key)
        assert sum(chunk.key == key for chunk in checkpoint.manifest.chunks) == 2, "the ranks have written a chunk each"
        expected = weight + ADAPTERS.alpha / ADAPTERS.rank * B @ A
        assert (expected - weight).norm() > 0
        filled = torch.empty_like(weight)
        merged.fill([block(key, tuple(weight.shape), *full_rectangle(filled), main=True)])
        for actual in (merged.whole(key), filled):
            assert_close(actual, expected)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
