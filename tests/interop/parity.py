"""Checks for every class of transformers: equal logits, and equal weights after import and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybridtron.architecture.model import ModelConfig
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.main import main
from hybridtron.data.batch import SeqInfo
from tests.interop.models import own_model


def assert_same_logits(checkpoint: Checkpoint, theirs: Any, tokens: int = 70, tolerance: float = 1e-5) -> None:
    """Compare logits for random tokens. `theirs` is a model of transformers with a vocabulary of 48."""
    tokens_BL = torch.randint(48, (2, tokens))
    with torch.no_grad():
        ours = own_model(checkpoint, torch.float32)(tokens_BL, None, SeqInfo.stream(2, tokens)).output.transpose(0, 1)
        expected = theirs(tokens_BL).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def exported_as_it_was(folder: Path) -> ModelConfig:
    """Export `mid`, an import of `in`, with the weights of `in` bit for bit. Returns the model of an import of that."""
    assert main(["export", "--checkpoint", str(folder / "mid"), "--output", str(folder / "out")]) == 0
    first, last = (load_file(folder / name / "model.safetensors") for name in ("in", "out"))
    assert first.keys() == last.keys()
    assert all(torch.equal(last[key], value) for key, value in first.items())
    assert main(["import", "--input", str(folder / "out"), "--output", str(folder / "again")]) == 0
    return Checkpoint.open(folder / "again").config.model
