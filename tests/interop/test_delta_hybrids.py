"""OLMo-Hybrid and Qwen3-Next: folders that transformers wrote, and why others are not of these classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.interop.export import TARGETS
from hybridtron.interop.rules import TensorRule
from tests.interop.models import CLASSES, TOKENIZER, model_config
from tests.interop.parity import assert_same_logits

COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 12,
}  # fmt: skip


def olmo_hybrid() -> PreTrainedModel:
    """Return a model with keys as wide as values: transformers cuts its cached convolution into equal thirds."""
    rope = {"rope_theta": None, "rope_type": "default"}  # as published: without positions
    return OlmoHybridForCausalLM(OlmoHybridConfig(**COMMON, rope_parameters=rope))


def qwen3_next() -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, head_dim=8, num_experts=0))


WRITERS = {"olmo_hybrid": olmo_hybrid, "qwen3_next": qwen3_next}


def written(name: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Write a folder by transformers itself, with weights far from their initial values; return its model."""
    torch.manual_seed(5)
    model = WRITERS[name]()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model = model.to(dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model.float().eval()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRITERS)
def test_imported_folder_gives_the_logits_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The model is also the same in bf16, where 1 + w would lose digits of w."""
    theirs = written(name, tmp_path / "in", dtype)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    imported = Checkpoint.open(tmp_path / "out")
    assert export_class(architecture(imported.config.model), Export.auto) == CLASSES[name]
    assert_same_logits(imported, theirs, tolerance=2e-5)


@pytest.mark.slow
def test_norms_of_a_bf16_folder_are_kept_in_fp32(tmp_path: Path) -> None:
    """Qwen3-Next's norm weights, which it adds to 1, return bit for bit, and our own weights lose nothing either."""
    written("qwen3_next", tmp_path / "in", torch.bfloat16)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    assert Checkpoint.open(tmp_path / "mid").whole("layers.0.norm.weight").dtype == torch.float32
    arguments = ["--checkpoint", str(tmp_path / "mid"), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(["export", *arguments]) == 0
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert set(first) == set(last)
    for key, value in first.items():
        assert torch.equal(last[key].to(value.dtype), value), key
        if "norm" in key and ".norm" not in key:
            assert last[key].dtype == torch.float32


def with_options(name: str, letter: str, **options: Any) -> ModelConfig:
    model = model_config(name)
    return replace(model, layers={**model.layers, letter: {**model.layers[letter], **options}})


OTHERS = {
    "norm_eps=0.001, not 1e-05": with_options("olmo_hybrid", "D", norm_eps=1e-3),
    "norm_eps=0.001, not model": with_options("olmo_hybrid", "A", norm_eps=1e-3),
    "qk_norm=head, not all": with_options("olmo_hybrid", "A", qk_norm="head"),
    "has a gate": with_options("olmo_hybrid", "A", gate=True),
    "have their norm before them": with_options("olmo_hybrid", "A", norm_after=False),
    "on the same side": with_options("olmo_hybrid", "+", norm_after=False),
    "not a mixture of gated_deltanet and attention": replace(model_config("olmo_hybrid"), pattern="D-D-"),
    "has a window": with_options("qwen3_next", "A", window=8),
    "has no gate": with_options("qwen3_next", "A", gate=False),
    "has negative_eigenvalues": with_options("qwen3_next", "D", negative_eigenvalues=True),
    "no rotary positions": with_options("qwen3_next", "A", rope="none"),
    "qk_norm=none, not head": with_options("qwen3_next", "A", qk_norm="none"),
    "sub-layers have their norm after them": with_options("qwen3_next", "D", norm_after=True),
    "no MLP after it": replace(model_config("qwen3_next"), pattern="D-A"),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_models_that_fit_no_class_are_exported_as_the_custom_class(reason: str) -> None:
    model = OTHERS[reason]
    assert export_class(architecture(model), Export.auto) == SHIPPED
    reasons = [misfit(architecture(model), model.norm_eps) or "" for misfit in NATIVE.values()]
    assert any(reason in text for text in reasons), reasons


@pytest.mark.parametrize(
    ("name", "changed", "named"),
    [
        ("olmo_hybrid", {"attention_bias": True}, "attention_bias=True"),
        ("olmo_hybrid", {"layer_types": ["linear_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("qwen3_next", {"num_experts": 512}, "num_experts"),
        ("qwen3_next", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type=yarn"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changed: dict[str, Any], named: str) -> None:
    target = next(target for target in TARGETS if target.name == CLASSES[name])
    settings = json.loads(json.dumps(target.config(architecture(model_config(name)), 64)))
    assert target.model(settings).pattern == model_config(name).pattern
    with pytest.raises(ValueError, match=named):
        target.model(settings | changed)


def test_fused_rows_are_ordered_by_head() -> None:
    """Fuse rows of two heads: the first head's rows of a, then its rows of b, then the second head's."""
    rule = TensorRule("theirs", (6, 1), ("a", "b"), (2, 4), fp32=False, blocks=2)
    a = torch.tensor([[1.0], [2.0]])
    b = torch.tensor([[3.0], [4.0], [5.0], [6.0]])
    fused = rule.to_theirs({"a": a, "b": b}.__getitem__)
    assert fused.flatten().tolist() == [1, 3, 4, 2, 5, 6]
    back = rule.to_ours(fused)
    assert torch.equal(back["a"], a)
    assert torch.equal(back["b"], b)
