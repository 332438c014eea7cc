"""OLMo-Hybrid, Qwen3-Next and Qwen3.5: folders of transformers, published folders, and models that fit no class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.interop.config_json import CannotImport, settings_of
from hybridtron.interop.export import TARGETS, target_of
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


EXPERTS: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip


def qwen3_next() -> PreTrainedModel:
    """Return a model with experts in all layers except one, whose router's weights are not divided by their sum."""
    only = {"mlp_only_layers": [1], "norm_topk_prob": False}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, **EXPERTS, **only, head_dim=8))


def qwen3_5() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, head_dim=8))


def qwen3_5_moe() -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**COMMON, **EXPERTS, head_dim=8, tie_word_embeddings=True))


WRITERS = {"olmo_hybrid": olmo_hybrid, "qwen3_next": qwen3_next, "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}


# With these weights transformers' fp32 logits differ by 4e-5 from its own in float64, which ours equal to 6e-7.
TOLERANCES = {"qwen3_next": 1e-4}


def noisy(name: str) -> PreTrainedModel:
    """Return a model of transformers with weights far from their initial values."""
    torch.manual_seed(5)
    model = WRITERS[name]()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model.eval()


def written(name: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Write a folder by transformers itself; return its model."""
    model = noisy(name).to(dtype)
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
    assert export_class(architecture(imported.config.model), Export.auto) == CLASSES[name.replace("5_moe", "next")]
    assert_same_logits(imported, theirs, tolerance=TOLERANCES.get(name, 2e-5))


MTP = {"mtp.fc.weight": torch.ones(2, 4), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}


def published(name: str, folder: Path) -> PreTrainedModel:
    """Write a folder of Qwen as it is published: names, shards, index, and tensors that an import drops."""
    model = noisy(name)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    settings = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if name == "qwen3_next":
        tensors = {part: tensor for key in tensors for part, tensor in of_each_expert(key, tensors[key]).items()} | MTP
        del settings["layer_types"]
        settings["full_attention_interval"] = 2
    else:
        del settings["architectures"]
        prefixes = {key: key.replace("model.", "model.language_model.", 1) for key in tensors}
        tensors = {prefixes[key]: tensor for key, tensor in tensors.items()} | MTP
        tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(4)
        if settings["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        settings["rope_parameters"] |= {"mrope_section": [1, 0, 0], "mrope_interleaved": True}
        settings = {
            "architectures": [type(model).__name__.replace("CausalLM", "ConditionalGeneration")],
            "model_type": settings["model_type"].removesuffix("_text"),
            "text_config": settings,
            "tie_word_embeddings": settings["tie_word_embeddings"],
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    shards = {
        "model-00001-of-00002.safetensors": sorted(tensors)[::2],
        "model-00002-of-00002.safetensors": sorted(tensors)[1::2],
    }
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / file, {"format": "pt"})
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model


def of_each_expert(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split a tensor of all experts in memory into the tensors of each expert in files."""
    start, _, projection = key.partition(".experts.")
    if projection == "gate_up_proj":
        parts = {"gate_proj": tensor.chunk(2, 1)[0], "up_proj": tensor.chunk(2, 1)[1]}
    elif projection == "down_proj":
        parts = {"down_proj": tensor}
    else:
        return {key: tensor}
    return {
        f"{start}.experts.{number}.{name}.weight": part.contiguous()
        for name, all_parts in parts.items()
        for number, part in enumerate(all_parts)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_published_folder_is_imported_without_what_training_does_not_have(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights return bit for bit, except norms, whose 1 is added and subtracted."""
    theirs = published(name, tmp_path / "in")
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    said = capsys.readouterr().out
    assert "without layers for multi-token prediction" in said
    assert ("a vision model" in said) is (name != "qwen3_next")
    imported = Checkpoint.open(tmp_path / "mid")
    assert_same_logits(imported, theirs, tolerance=TOLERANCES.get(name, 2e-5))

    arguments = ["--checkpoint", str(tmp_path / "mid"), "--output", str(tmp_path / "out")]
    assert main(["export", *arguments, "--target", type(theirs).__name__]) == 0
    first = {key: value for file in (tmp_path / "in").glob("*.safetensors") for key, value in load_file(file).items()}
    last = load_file(tmp_path / "out/model.safetensors")
    kept = {key: value for key, value in first.items() if not key.startswith(("mtp.", "model.visual."))}
    assert {key.replace("language_model.", "") for key in kept} == set(last)
    for key, value in kept.items():
        returned = last[key.replace("language_model.", "")]
        if ("norm" in key and ".norm" not in key) or key.endswith("model.norm.weight"):
            torch.testing.assert_close(returned, value, rtol=0, atol=2.0**-23)
        else:
            assert torch.equal(returned, value), key


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
    "has a window": with_options("qwen3_5", "A", window=8),
    "has no gate": with_options("qwen3_5", "A", gate=False),
    "has negative_eigenvalues": with_options("qwen3_5", "D", negative_eigenvalues=True),
    "no rotary positions": with_options("qwen3_5", "A", rope="none"),
    "qk_norm=none, not head": with_options("qwen3_5", "A", qk_norm="none"),
    "sub-layers have their norm after them": with_options("qwen3_5", "D", norm_after=True),
    "no MLP after it": replace(model_config("qwen3_5"), pattern="D-A"),
    "have shared_gate=False, not True": with_options("qwen3_next", "E", shared_gate=False),
    "have scores=sigmoid, not softmax": with_options("qwen3_next", "E", scores="sigmoid"),
    "correct the scores": with_options("qwen3_next", "E", balance="bias"),
    "have latent=8, not None": with_options("qwen3_next", "E", latent=8),
    "have no shared expert": with_options("qwen3_next", "E", shared=0, shared_gate=False),
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
        ("qwen3_next", {"num_experts": 2**17}, "experts"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type=yarn"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changed: dict[str, Any], named: str) -> None:
    target = next(target for target in TARGETS if target.name == CLASSES[name])
    settings = json.loads(json.dumps(target.config(architecture(model_config(name)), 64)))
    assert target.model(settings).pattern == model_config(name).pattern
    with pytest.raises(ValueError, match=named):
        target.model(settings | changed)


def test_one_of_several_fitting_classes_can_be_required() -> None:
    model = replace(with_options("qwen3_next", "E", normalise=True), pattern="DEAE")
    arch = architecture(model)
    assert target_of(arch, Export.auto).name == "Qwen3NextForCausalLM"
    assert target_of(arch, Export.native, "Qwen3_5MoeForCausalLM").name == "Qwen3_5MoeForCausalLM"
    with pytest.raises(CannotExport) as refused:
        target_of(arch, Export.native, "LlamaForCausalLM")
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize(
    ("text", "code"), [(3, "malformed"), ({"tie_word_embeddings": True}, "conflict"), ({"vocab_size": 0}, "malformed")]
)
def test_faulty_settings_of_a_language_model_are_refused(text: Any, code: str, tmp_path: Path) -> None:
    settings = {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "text_config": text}))
    with pytest.raises(CannotImport) as refused:
        settings_of(tmp_path)
    assert refused.value.code == code


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
