"""Jamba and Falcon-Mamba: folders that transformers wrote, the places of layers, and refused models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import FalconMambaConfig, FalconMambaForCausalLM, JambaConfig, JambaForCausalLM

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.config.hf_compat import Period, period_of
from hybridtron.interop.native_jamba import FalconMamba, Jamba
from tests.interop.models import TOKENIZER, model_config
from tests.interop.parity import assert_same_logits, exported_as_it_was

JAMBA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2,
    "expert_layer_offset": 1, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 6, "mamba_d_conv": 3,
    "rms_norm_eps": 1e-4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "hidden_size": 32, "vocab_size": 48, "num_hidden_layers": 2, "state_size": 6, "mixer_rms_eps": 1e-3,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def written(folder: Path, model: Any) -> Any:
    """Write a folder by transformers itself, with weights far from their initial values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model


def read_back(folder: Path, theirs: Any) -> str:
    """Import `in`, compare logits, export again, and return the imported pattern."""
    assert main(["import", "--input", str(folder / "in"), "--output", str(folder / "mid")]) == 0
    checkpoint = Checkpoint.open(folder / "mid")
    assert_same_logits(checkpoint, theirs)
    assert exported_as_it_was(folder) == checkpoint.config.model
    return checkpoint.config.model.pattern


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({}, "M-MEA-MEM-"),
        ({"num_experts": 1, "mamba_dt_rank": 3, "tie_word_embeddings": True}, "M-M-A-M-M-"),
        ({"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 5}, "MEMEAEMEME"),
    ],
    ids=["jamba", "dense", "experts"],
)
def test_imported_jamba_gives_the_logits_of_transformers(
    settings: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    theirs = written(tmp_path / "in", JambaForCausalLM(JambaConfig(**{**JAMBA, **settings})))
    names = load_file(tmp_path / "in/model.safetensors").keys()
    is_dense = "E" not in pattern
    assert ("model.layers.1.feed_forward.experts.3.gate_proj.weight" in names) is not is_dense  # as published
    assert read_back(tmp_path, theirs) == pattern


def test_imported_falcon_mamba_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    theirs = written(tmp_path / "in", FalconMambaForCausalLM(FalconMambaConfig(**FALCON)))
    assert read_back(tmp_path, theirs) == "M*2"


def test_epsilon_of_falcon_mamba_has_a_default() -> None:
    theirs = json.loads(FalconMambaConfig(**FALCON).to_json_string(use_diff=False))
    del theirs["mixer_rms_eps"]
    assert FalconMamba().model(theirs).layers["M"]["norm_eps"] == FalconMambaConfig().mixer_rms_eps


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mamba_conv_bias": False}, "mamba_conv_bias=False"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attn_layer_period": 9, "attn_layer_offset": 8}, "no layer with attention"),
        ({"num_experts": 2**17}, "131072 experts in 5 layers"),
    ],
)
def test_unsupported_settings_are_refused(changed: dict[str, Any], named: str) -> None:
    theirs = json.loads(JambaConfig(**JAMBA).to_json_string(use_diff=False))
    Jamba().model(theirs)
    with pytest.raises(ValueError, match=named):
        Jamba().model({**theirs, **changed})


@pytest.mark.parametrize(
    ("places", "period"),
    [
        ([1, 3, 5], Period(2, 1)),
        ([4], Period(5, 4)),
        ([1], Period(5, 1)),
        ([0, 1, 2, 3, 4, 5], Period(1, 0)),
        ([], Period(7, 6)),
        ([1, 3], None),
        ([3, 4, 5], None),
        ([0, 2, 5], None),
    ],
)
def test_layers_at_equal_distances_have_a_period(places: list[int], period: Period | None) -> None:
    assert period_of([index in places for index in range(6)]) == period
    if period is not None:
        assert [index for index in range(6) if index % period.period == period.offset] == places


def with_options(letter: str, **options: Any) -> ModelConfig:
    model = model_config("jamba")
    return replace(model, layers={**model.layers, letter: {**model.layers[letter], **options}})


OTHERS = {
    "its mamba has inner_norm=none, not learned": with_options("M", inner_norm="none"),
    "its mamba has norm_eps=0.001, not model": with_options("M", norm_eps=1e-3),
    "its attention has rotary positions": with_options("A", rope={"base": 100.0}),
    "its attention has a window": with_options("A", window=8),
    "its attention's heads together are not as wide": with_options("A", head_dim=4),
    "its MLPs and its experts have different sizes": with_options("E", hidden=48),
    "its experts have normalise=True": with_options("E", normalise=True),
    "its experts have shared=8": with_options("E", shared=8),
    "its experts have a correction": with_options("E", balance="bias"),
    "its experts have latent=8": with_options("E", latent=8),
    "its moe sub-layers do not follow": replace(model_config("jamba"), pattern="M-AEMEM-ME"),
    "its attention sub-layers do not follow": replace(model_config("jamba"), pattern="A-MEA-AE"),
    "its mixers are not each followed by": replace(model_config("jamba"), pattern="M-AEM"),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_models_of_another_shape_are_exported_as_the_custom_class(reason: str) -> None:
    model = OTHERS[reason]
    assert export_class(architecture(model), Export.auto) == SHIPPED
    with pytest.raises(CannotExport, match=f"JambaForCausalLM: {reason}") as refused:
        export_class(architecture(model), Export.native)
    assert refused.value.code == "unsupported"


def test_mamba_with_inner_norms_is_not_exported_as_mamba() -> None:
    assert export_class(architecture(model_config("falcon_mamba")), Export.auto) == "FalconMambaForCausalLM"
    learned = replace(model_config("falcon_mamba"), layers={"M": {"kind": "mamba", "inner_norm": "learned"}})
    assert export_class(architecture(learned), Export.auto) == SHIPPED
