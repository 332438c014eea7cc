"""A model with experts that starts from a folder of transformers, after its import."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.train.start import check_same_weights
from hybridtron.train.upcycled import upcycled_layers
from tests.interop.conftest import Stored


def test_experts_start_as_copies_of_imported_weights(stored: Stored, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    assert (
        main(["export", "--checkpoint", str(stored("llama").folder), "--output", str(exported), "--verify", "none"])
        == 0
    )
    assert main(["import", "--input", str(exported), "--output", str(tmp_path / "imported")]) == 0
    checkpoint = Checkpoint.open(tmp_path / "imported")
    model = checkpoint.config.model
    (letter,) = (name for name, options in model.layers.items() if options["kind"] == "swiglu")
    hidden = model.layers[letter]["hidden"]
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": hidden}
    arch = architecture(dataclasses.replace(model, layers={**model.layers, letter: experts}))
    lines = check_same_weights(checkpoint, arch, "run.weights", may_grow=True)
    assert any("each of 4 experts starts as a copy" in line for line in lines)
    layer = upcycled_layers(checkpoint.plan.arch, arch)[0]
    read = checkpoint.weights(checkpoint.plan.arch.table, unrounded=True)
    name = f"{layer.prefix}gate_up"
    copies = layer.value(name, arch.table[name], 0, read)
    assert copies.shape == (4, 2 * hidden, model.width)
    assert torch.equal(copies[3], read(f"{layer.prefix}gate_up.weight"))
