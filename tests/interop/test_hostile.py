"""Folders that are meant to break an import: each ends at once, with exit code 2 and words that name file and key."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hybridtron.cli.convert import main
from hybridtron.data.prepare import template_process
from hybridtron.problems import Unusable
from tests.cli.test_evaluate import tokenizer
from tests.interop.refusals import refusal

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 56, "rms_norm_eps": 1e-5,
}  # fmt: skip
ORIGINAL: dict[str, Any] = {"d_model": 32, "n_layer": 2, "vocab_size": 77, "ssm_cfg": {"layer": "Mamba2"}}
SHIPPED: dict[str, Any] = {
    "architectures": ["HybridtronForCausalLM"], "hidden_size": 32, "vocab_size": 80, "pattern": "A-",
    "rms_norm_eps": 1e-5, "layers": {"A": {"kind": "attention", "heads": 4}, "-": {"kind": "swiglu", "hidden": 56}},
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"vocab_size": None}, "vocab_size"),
    (LLAMA, {"hidden_size": "32"}, "hidden_size"),
    (LLAMA, {"hidden_size": True}, "hidden_size"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": -1}, "num_hidden_layers"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
    (LLAMA, {"num_key_value_heads": 3}, "kv_heads"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA, {"architectures": "Llama"}, "architectures"),
    (LLAMA, {"architectures": [7]}, "architectures"),
    (LLAMA, {"rope_parameters": [1]}, "rope_parameters"),
    (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "low_freq_factor"),
    (LLAMA, {"attention_bias": True}, "attention_bias"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA, {"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
    (LLAMA, {"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    (ORIGINAL, {"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple"),
    (ORIGINAL, {"ssm_cfg": [1]}, "ssm_cfg"),
    (ORIGINAL, {"ssm_cfg": {"layer": ["Mamba2"]}}, "ssm_cfg.layer"),
    (ORIGINAL, {"ssm_cfg": {"layer": "Mamba2", "headdim": 0}}, "ssm_cfg.headdim"),
    (ORIGINAL, {"d_model": "16"}, "d_model"),
    (ORIGINAL, {"n_layer": 10**9}, "n_layer"),
    (ORIGINAL, {"n_layer": 1e9}, "n_layer"),
    (ORIGINAL, {"attn_layer_idx": {"0": 1}}, "attn_layer_idx"),
    (ORIGINAL, {"attn_layer_idx": [0]}, "attn_cfg"),
    (ORIGINAL, {"vocab_size": 2**63}, "vocab_size"),
    (SHIPPED, {"pattern": "A*1000000000"}, "pattern"),
    (SHIPPED, {"pattern": ""}, "pattern"),
    (SHIPPED, {"layers": {"A": []}}, "layers"),
    (SHIPPED, {"layers": {"A": {"kind": "attention", "heads": 0}, "-": {"kind": "swiglu", "hidden": 8}}}, "heads"),
    (SHIPPED, {"layers": [["A"]]}, "layers"),
]


def refused(folder: Path, *options: object) -> Unusable:
    error = refusal(["import", folder, *options, "--output", folder / "back"])
    assert not (folder / "back").exists()
    return error


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("base", "change", "named"), CHANGES, ids=[str(change)[:50] for _, change, _ in CHANGES])
def test_impossible_settings_are_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**base, **change}))
    message = str(refused(tmp_path))
    assert named in message
    assert "config.json config.json" not in message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["[]", '"x"', "[" * 100_000, "", "{", "\x00", '{"d_model": ' + "9" * 10_000 + "}"])
def test_config_json_without_an_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    error = refused(tmp_path)
    assert error.code in ("unreadable", "malformed")
    assert "config.json" in str(error)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_malformed_index_of_shards_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    error = refused(tmp_path)
    assert error.code in ("unreadable", "malformed")
    assert "index.json" in str(error)


def test_weights_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    head = json.dumps({"model.norm.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 4)
    error = refused(tmp_path)
    assert error.code == "unsupported"
    assert "model.safetensors: model.norm.weight" in str(error)


@pytest.mark.parametrize("stored", [[1, 2], {"a": 1}, torch.zeros(2)], ids=str)
def test_pickle_without_named_tensors_is_refused(stored: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.save(stored, tmp_path / "pytorch_model.bin")
    error = refused(tmp_path)
    assert error.code == "unreadable"
    assert "pytorch_model.bin" in str(error)


def test_adapter_without_a_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    error = refused(tmp_path)
    assert error.code == "unsupported"
    assert "peft_type" in str(error)


def test_query_norms_in_a_llama_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.save({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, tmp_path / "pytorch_model.bin")
    error = refused(tmp_path)
    assert error.code == "mismatch"
    assert "q_norm.weight" in str(error)


ENDLESS = ["/dev/zero", "pipe"]
FILES_OF_MODELS = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
]  # fmt: skip
FILES_OF_ADAPTERS = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "tokenizer.json"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model's folder that can be imported until a test damages it, with an adapter beside it."""
    folder = tmp_path_factory.mktemp("whole")
    config = LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "architectures"})
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer().save(str(folder / "model" / "tokenizer.json"))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    layer = "base_model.model.model.layers.0.self_attn.o_proj.lora"
    save_file(
        {f"{layer}_A.weight": torch.ones(2, 32), f"{layer}_B.weight": torch.ones(32, 2)},
        folder / "adapter" / "adapter_model.safetensors",
    )
    return folder


def replaced(folder: Path, name: str, target: str) -> None:
    """Put a link to a pipe or a device in the place of a file."""
    os.mkfifo(folder / "pipe")
    (folder / name).unlink(missing_ok=True)
    if name.endswith(".bin"):
        for file in folder.glob("*.safetensors"):
            file.unlink()
    (folder / name).symlink_to(target)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ENDLESS)
@pytest.mark.parametrize("name", FILES_OF_MODELS)
def test_pipes_and_devices_among_the_files_of_a_model_are_refused(
    name: str, target: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole / "model", tmp_path / "model")
    replaced(tmp_path / "model", name, target)
    error = refused(tmp_path / "model")
    assert error.code == "unreadable"
    assert str(tmp_path / "model") in str(error)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ENDLESS)
@pytest.mark.parametrize("name", FILES_OF_ADAPTERS)
def test_pipes_and_devices_among_the_files_of_an_adapter_are_refused(
    name: str, target: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole / "adapter", tmp_path / "adapter")
    replaced(tmp_path / "adapter", name, target)
    error = refused(tmp_path / "adapter", "--base", whole / "model")
    assert error.code == "unreadable"
    assert str(tmp_path / "adapter" / name) in str(error)


def test_undamaged_folders_are_imported(whole: Path, tmp_path: Path) -> None:
    command = ["import", "--verify", "none", "--input"]
    assert main([*command, str(whole / "model"), "--output", str(tmp_path / "model")]) == 0
    base = ["--base", str(whole / "model"), "--output", str(tmp_path / "adapter")]
    assert main([*command, str(whole / "adapter"), *base]) == 0


TEMPLATES = {"{% for": "parse", "{{ " + "(" * 3000 + " }}": "nested", "{{ 7**(10**9) }}": "computes"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_unusable_chat_template_is_refused(
    template: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 0.3)
    shutil.copytree(whole / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    error = refused(tmp_path / "model")
    assert error.code == "malformed"
    assert TEMPLATES[template] in str(error)
    assert str(tmp_path / "model") in str(error)


def test_malformed_tokenizer_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    error = refused(tmp_path / "model")
    assert error.code == "unreadable"
    assert str(tmp_path / "model" / "tokenizer.json") in str(error)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("settings", "named"), [({"lora_alpha": 10**400}, "lora_alpha"), ({"r": 10**400}, "r ")])
def test_numbers_beyond_the_range_of_floats_are_refused(
    settings: dict[str, int], named: str, whole: Path, tmp_path: Path
) -> None:
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    error = refused(tmp_path, "--base", whole / "model")
    assert error.code == "unsupported"
    assert f"has {named}" in str(error)


@pytest.mark.timeout(20)
def test_thousands_of_unknown_layers_are_refused_quickly(whole: Path, tmp_path: Path) -> None:
    """The base model's rules are built once, not again for each unknown layer."""
    shutil.copy(whole / "adapter" / "adapter_config.json", tmp_path)
    names = [f"base_model.model.model.layers.{number}.unknown.lora_A.weight" for number in range(3000)]
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "adapter_model.safetensors")
    assert refused(tmp_path, "--base", whole / "model").code == "mismatch"
