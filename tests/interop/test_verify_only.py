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
from tests.cli.test_evaluate import tokenizer
from tests.interop.test_hostile import LLAMA

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ...}, "config.json has architectures=None, must begin with one of MambaForCausalLM"),
    ({"architectures": []}, "config.json has architectures=[], must begin with one of"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', must be a list of texts"),
    ({"architectures": None}, "architectures is None, must be a list of texts"),
    ({"architectures": ["Qwen2ForCausalLM"]}, "architectures=['Qwen2ForCausalLM'], must begin with one of"),
    ({"architectures": [], "auto_map": {"AutoConfig": "a.B"}}, "architectures=[], must begin with one of"),
    ({"architectures": ["NemotronHForCausalLM"]}, "model_type='llama', must be nemotron_h for NemotronHForCausalLM"),
    ({"model_type": ...}, "model_type=None, must be llama for LlamaForCausalLM"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn', must be one of float32, bfloat16, float16"),
    ({"dtype": [1]}, "dtype=[1], must be one of"),
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


def proven(base: Path, folder: Path) -> int:
    return main(["export", str(base / "imported"), "--output", str(folder), "--verify", "only"])


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=[str(changes) for changes, _ in CHANGES])
def test_a_configuration_that_can_t_be_proven_is_refused(
    changes: dict[str, Any], message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert proven(base, changed(base, tmp_path / "model", changes)) == 2
    assert message in capsys.readouterr().err


def test_a_class_without_the_model_s_layers_is_not_the_same(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    assert proven(base, changed(base, tmp_path / "model", changes)) == 1
    assert "is a Qwen3NextForCausalLM, which can't be the checkpoint's" in capsys.readouterr().err


def test_broken_weights_are_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(base, tmp_path / "model", {})
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert proven(base, folder) == 2
    assert f"{folder / 'model.safetensors'} can't be read" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{}, {"dtype": ...}, {"dtype": ..., "torch_dtype": "float32"}], ids=str)
def test_a_dtype_by_each_of_its_keys_is_proven(changes: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """transformers 4 wrote `torch_dtype`; hand-made files may have none."""
    assert proven(base, changed(base, tmp_path / "model", changes)) == 0


def test_weights_in_fp16_are_imported_with_a_proof(base: Path, tmp_path: Path) -> None:
    folder = changed(base, tmp_path / "model", {})
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert main(["import", str(folder), "--output", str(tmp_path / "imported")]) == 0
