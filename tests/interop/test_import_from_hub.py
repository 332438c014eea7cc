"""A model on the Hub is downloaded and imported, as its folder would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.main import main
from hybridtron.interop.verify import whole_model
from tests.interop.conftest import Stored
from tests.storage.publisher import publishing


def test_model_of_the_hub_is_imported(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stored("mamba2")
    export = tmp_path / "export"
    assert main(["export", str(source.folder), "--output", str(export), "--verify", "none"]) == 0
    output = tmp_path / "imported"
    with publishing() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        files = {file.name: file.read_bytes() for file in export.iterdir()}
        server.publish("mary/mamba2", files, hashed="model.safetensors", kind="models")
        assert main(["import", "hf:mary/mamba2", "--output", str(output), "--verify", "none"]) == 0
    assert not (tmp_path / "imported.downloads/README.md").exists()
    imported = whole_model(Checkpoint.open(output)).state_dict()
    weights = whole_model(source).state_dict()
    assert imported.keys() == weights.keys()
    assert all(torch.equal(imported[name], weight) for name, weight in weights.items())
