"""A folder that can't be proven ends `--verify only` with a message and an exit code; configurations of older
transformers, and of 16-bit weights, are proven."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridtron.cli.convert import main
from hybridtron.problems import Code
from tests.cli.test_evaluate import tokenizer
from tests.interop.refusals import refusal
from tests.interop.test_hostile import LLAMA

CHANGES: list[tuple[dict[str, Any], Code, str]] = [
    ({"architectures": ...}, "unsupported", "architectures=None"),
    ({"architectures": []}, "unsupported", "architectures=[]"),
    ({"architectures": "LlamaForCausalLM"}, "malformed", "architectures"),
    ({"architectures": None}, "malformed", "architectures"),
    ({"architectures": ["Qwen2ForCausalLM"]}, "unsupported", "architectures=['Qwen2ForCausalLM']"),
    ({"architectures": [], "auto_map": {"AutoConfig": "a.B"}}, "unsupported", "architectures=[]"),
    ({"architectures": ["NemotronHForCausalLM"]}, "conflict", "model_type='llama'"),
    ({"model_type": ...}, "conflict", "model_type=None"),
    ({"num_attention_heads": 0}, "malformed", "num_attention_heads"),
    ({"dtype": "float8_e4m3fn"}, "unsupported", "dtype='float8_e4m3fn'"),
    ({"dtype": [1]}, "unsupported", "dtype=[1]"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of transformers in `model`, and its import in `imported`."""
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "architectures"})
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer().save(str(folder / "model/tokenizer.json"))
    command = ["import", str(folder / "model"), "--output", str(folder / "imported")]
    assert main([*command, "--verify", "none"]) == 0
    return folder


def changed(base: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """Copy the model, with some keys of its config.json replaced, and those with the value ... removed."""
    shutil.copytree(base / "model", folder)
    settings = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in settings.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def proof_of(base: Path, folder: Path) -> list[str]:
    """Return the command that proves an existing export."""
    return ["export", str(base / "imported"), "--output", str(folder), "--verify", "only"]


@pytest.mark.parametrize(("changes", "code", "named"), CHANGES, ids=[str(changes) for changes, _, _ in CHANGES])
def test_unprovable_configurations_are_refused(
    changes: dict[str, Any], code: Code, named: str, base: Path, tmp_path: Path
) -> None:
    error = refusal(proof_of(base, changed(base, tmp_path / "model", changes)))
    assert error.code == code
    assert named in str(error)


def test_class_without_the_layers_of_the_model_fails_the_proof(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    assert main(proof_of(base, changed(base, tmp_path / "model", changes))) == 1
    assert "Qwen3NextForCausalLM" in capsys.readouterr().err


def test_broken_weights_are_refused(base: Path, tmp_path: Path) -> None:
    folder = changed(base, tmp_path / "model", {})
    (folder / "model.safetensors").write_bytes(b"no weights")
    error = refusal(proof_of(base, folder))
    assert error.code == "unreadable"
    assert str(folder / "model.safetensors") in str(error)


@pytest.mark.parametrize("changes", [{}, {"dtype": ...}, {"dtype": ..., "torch_dtype": "float32"}], ids=str)
def test_dtype_is_read_from_its_current_and_former_key(changes: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """transformers 4 wrote `torch_dtype`; hand-made files may have none."""
    assert main(proof_of(base, changed(base, tmp_path / "model", changes))) == 0


def test_fp16_weights_are_imported_with_a_proof(base: Path, tmp_path: Path) -> None:
    folder = changed(base, tmp_path / "model", {})
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert main(["import", str(folder), "--output", str(tmp_path / "imported")]) == 0
