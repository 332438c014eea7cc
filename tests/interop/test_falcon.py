"""Falcon-H1: folders that transformers wrote, their export, and refused ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.interop.native_falcon import FalconH1
from hybridtron.interop.sample import sampled
from tests.interop.models import TOKENIZER, model_config
from tests.interop.parity import assert_same_logits, exported_as_it_was
from tests.slow import slow_except

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6,
    "mamba_chunk_size": 16, "rms_norm_eps": 1e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
}  # fmt: skip
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "key_multiplier": 0.39062499999999994,
    "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3, 0.5, 0.7], "ssm_out_multiplier": 0.23570226039551587,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "multiplied": MULTIPLIERS,
    "normed": {**MULTIPLIERS, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    "plain": {"mamba_d_head": "auto", "mamba_d_ssm": None, "mamba_n_heads": 8},
}


@pytest.mark.parametrize("variant", slow_except(VARIANTS, "normed"))
def test_folder_of_transformers_survives_import_and_export(variant: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    theirs = FalconH1ForCausalLM(FalconH1Config(**{**SIZES, **VARIANTS[variant]})).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.2 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(TOKENIZER)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    imported = Checkpoint.open(tmp_path / "mid")
    model = imported.config.model
    assert model.pattern == "(MA-)*3"
    assert export_class(architecture(model), Export.auto) == "FalconH1ForCausalLM"
    assert_same_logits(imported, theirs)

    again = exported_as_it_was(tmp_path)
    assert (again.pattern, again.layers["-"]) == (model.pattern, model.layers["-"])
    for letter in "MA":
        scales = [config.layers[letter].pop("scale", 0.0) for config in (again, model)]
        assert again.layers[letter] == model.layers[letter]
        assert scales[0] == pytest.approx(scales[1], rel=1e-15, abs=0)


@pytest.mark.parametrize("name", ["key_multiplier", "attention_in_multiplier", "ssm_in_multiplier", *MULTIPLIERS])
def test_every_multiplier_changes_the_imported_model(name: str) -> None:
    """A wrong multiplier would therefore show in the tests above."""
    theirs = json.loads(FalconH1Config(**SIZES).to_json_string(use_diff=False))
    plain = FalconH1().model(theirs)
    assert FalconH1().model({**theirs, name: MULTIPLIERS[name]}) != plain


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"projectors_bias": True}, "projectors_bias"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ({"mamba_n_heads": 5}, "mamba_n_heads"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers"),
    ],
)
def test_unsupported_settings_are_refused(changed: dict[str, Any], named: str) -> None:
    theirs = json.loads(FalconH1Config(**SIZES).to_json_string(use_diff=False))
    FalconH1().model(theirs)
    with pytest.raises(ValueError, match=named):
        FalconH1().model({**theirs, **changed})


@pytest.mark.parametrize(
    ("letter", "options", "reason"),
    [
        ("A", {"window": 8}, "a window"),
        ("A", {"rope": "none"}, "no rotary positions"),
        ("A", {"rotary_dim": 4}, "rotate only a part of each head"),
        ("A", {"qk_norm": "head"}, "qk_norm=head"),
        ("A", {"beside": False}, "not parallel to mamba2"),
        ("M", {"norm": True, "norm_eps": 1e-3}, "norm_eps"),
        ("M", {"dt_floor": 0.01}, "dt_floor"),
        ("-", {"norm_after": True}, "norm after"),
    ],
)
def test_models_of_another_shape_get_a_reason(letter: str, options: dict[str, Any], reason: str) -> None:
    model = model_config("falcon_h1")
    changed = replace(model, layers={**model.layers, letter: {**model.layers[letter], **options}})
    assert reason in (NATIVE["FalconH1ForCausalLM"](architecture(changed), changed.norm_eps) or "")


@pytest.mark.parametrize("pattern", ["MAM-", "MA-M", "M-A-", "MA--MA"])
def test_other_orders_of_layers_are_exported_as_the_custom_class(pattern: str) -> None:
    model = model_config("falcon_h1")
    layers = {**model.layers, "A": {**model.layers["A"], "beside": pattern != "M-A-"}}
    assert export_class(architecture(replace(model, pattern=pattern, layers=layers)), Export.auto) == SHIPPED


def test_residual_multiplier_does_not_fit_falcon() -> None:
    model = replace(model_config("falcon_h1"), residual_multiplier=2.0)
    with pytest.raises(CannotExport, match="residual_multiplier") as refused:
        export_class(architecture(model), Export.native)
    assert refused.value.code == "unsupported"


def test_parallel_branches_and_multipliers_fit_no_bamba() -> None:
    """Beside each other and multiplied these are no hybrid of Granite's or Bamba's."""
    model = model_config("bamba")
    for letter, option in (("A", {"beside": True}), ("-", {"gate_multiplier": 2.0}), ("M", {"output_multiplier": 2.0})):
        changed = replace(model, layers={**model.layers, letter: {**model.layers[letter], **option}})
        assert export_class(architecture(changed), Export.auto) == SHIPPED


def test_sampled_layers_are_complete_groups() -> None:
    model = model_config("falcon_h1")
    arch = architecture(replace(model, pattern="(MA-)*4"))
    assert [arch.letters[index] for index in sampled(arch, FalconH1())] == list("MA-MA-")
