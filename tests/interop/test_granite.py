"""Granite, dense and hybrid: multipliers in folders that transformers wrote, their export, and refused ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
)

from hybridtron.architecture.model import MULTIPLIERS, ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.interop.export import TARGETS
from hybridtron.interop.native_granite import Granite, GraniteHybrid
from tests.interop.models import CLASSES, TOKENIZER, model_config
from tests.interop.parity import assert_same_logits, exported_as_it_was
from tests.slow import slow_except

COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-4,
    "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 10, "attention_multiplier": 0.0625,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 40,
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "position_embedding_type": "nope",
}  # fmt: skip


def granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**COMMON, head_dim=12))


def hybrid() -> PreTrainedModel:
    """Return a hybrid with a tied embedding, like the published ones."""
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**COMMON, **HYBRID, tie_word_embeddings=True))


def experts() -> PreTrainedModel:
    """Return a hybrid with experts, whose inner channels differ in number from the shared expert's."""
    more = {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 24}
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**COMMON, **{**HYBRID, **more}))


@pytest.mark.parametrize("create", slow_except([granite, hybrid, experts], hybrid, experts))
def test_folder_of_transformers_survives_import_and_export(create: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    theirs = create().eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.2 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(TOKENIZER)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    imported = Checkpoint.open(tmp_path / "mid")
    model = imported.config.model
    assert [getattr(model, name) for name in MULTIPLIERS] == [12, 0.22, 10]
    assert model.layers["A"]["scale"] == 0.0625
    assert export_class(architecture(model), Export.auto) == type(theirs).__name__
    assert_same_logits(imported, theirs)

    assert exported_as_it_was(tmp_path) == model


def without(model: ModelConfig) -> ModelConfig:
    """Return the model without any multiplier."""
    layers = {letter: {k: v for k, v in options.items() if k != "scale"} for letter, options in model.layers.items()}
    return replace(model, layers=layers, **dict.fromkeys(MULTIPLIERS, 1.0))


@pytest.mark.parametrize("name", MULTIPLIERS)
@pytest.mark.parametrize("family", ["mistral", "mamba", "mamba2", "bamba", "olmo_hybrid", "nemotron_h"])
def test_multipliers_fit_no_other_class(family: str, name: str) -> None:
    model = replace(model_config(family), **{name: 2.0})
    assert export_class(architecture(replace(model, **{name: 1.0})), Export.auto) == CLASSES[family]
    assert export_class(architecture(model), Export.auto) == SHIPPED
    with pytest.raises(CannotExport, match=f"{CLASSES[family]}: .*{name}") as refused:
        export_class(architecture(model), Export.native)
    assert refused.value.code == "unsupported"


def test_scale_of_attention_fits_no_bamba() -> None:
    model = model_config("bamba")
    assert export_class(architecture(model), Export.auto) == "BambaForCausalLM"
    scaled = replace(model, layers={**model.layers, "A": {**model.layers["A"], "scale": 0.1}})
    assert export_class(architecture(scaled), Export.auto) == SHIPPED
    with pytest.raises(CannotExport) as refused:
        export_class(architecture(scaled), Export.native)
    assert refused.value.code == "unsupported"


def test_model_without_multipliers_is_exported_as_llama() -> None:
    model = without(model_config("dense_granite"))
    assert export_class(architecture(model), Export.auto) == "LlamaForCausalLM"
    for name in MULTIPLIERS:
        assert export_class(architecture(replace(model, **{name: 2.0})), Export.auto) == "GraniteForCausalLM"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"pattern": "M-M-"}, "it has no attention"), ({"norm_eps": 1e-3}, "norm_eps=1e-05, not model.norm_eps=0.001")],
)
def test_models_of_another_shape_get_a_reason(changed: dict[str, Any], reason: str) -> None:
    """Without attention transformers' class computes, but cannot generate from a cache."""
    model = replace(model_config("granite-scaled"), **changed)
    assert export_class(architecture(model), Export.auto) == SHIPPED
    assert reason in (NATIVE["GraniteMoeHybridForCausalLM"](architecture(model), model.norm_eps) or "")


@pytest.mark.parametrize(
    ("name", "changed", "named"),
    [
        ("granite-scaled", {"layer_types": ["mamba", "mamba"]}, "layer with attention"),
        ("dense_granite", {"attention_bias": True}, "attention_bias=True"),
        ("dense_granite", {"mlp_bias": True}, "mlp_bias=True"),
        ("granite-scaled", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ("granite-scaled", {"layer_types": ["mamba", "conv"]}, "layer_types"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changed: dict[str, Any], named: str) -> None:
    target = next(target for target in TARGETS if target.name == CLASSES[name.partition("-")[0]])
    assert isinstance(target, Granite | GraniteHybrid)
    settings = json.loads(json.dumps(target.config(architecture(model_config(name)), 64)))
    assert target.model(settings).pattern
    with pytest.raises(ValueError, match=named):
        target.model(settings | changed)
