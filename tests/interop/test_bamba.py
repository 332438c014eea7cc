"""Bamba: folders that transformers wrote, and refused ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.interop.config_json import CannotImport, settings_of
from hybridtron.interop.native_bamba import Bamba
from hybridtron.interop.native_granite import GraniteHybrid
from tests.interop.models import TOKENIZER, model_config
from tests.interop.parity import assert_same_logits

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-4,
    "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 20},
}  # fmt: skip


def test_imported_folder_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """The folder may also leave out the size of a head."""
    torch.manual_seed(5)
    theirs = BambaForCausalLM(BambaConfig(**SIZES)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.2 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(TOKENIZER)
    settings = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(settings | {"mamba_d_head": "auto"}))
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    imported = Checkpoint.open(tmp_path / "out")
    assert imported.config.model.pattern == "M-A-M-"
    assert export_class(architecture(imported.config.model), Export.auto) == "BambaForCausalLM"
    assert_same_logits(imported, theirs)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"time_step_limit": 7}, "time_step_limit=7"),
        ({"partial_rotary_factor": 1.0, "rope_parameters": None}, "partial_rotary_factor=1.0"),
        ({"mamba_n_heads": 4}, "mamba_n_heads x mamba_d_head"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
    ],
)
def test_unsupported_settings_are_refused(changed: dict[str, Any], named: str) -> None:
    theirs = json.loads(BambaConfig(**SIZES).to_json_string(use_diff=False))
    Bamba().model(theirs)
    with pytest.raises(ValueError, match=named):
        Bamba().model({**theirs, **changed})


@pytest.mark.parametrize("size", [None, 0, "none"])
def test_wrong_head_sizes_are_refused(size: int | str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"mamba_d_head": size}))
    with pytest.raises(CannotImport, match="mamba_d_head") as refused:
        settings_of(tmp_path)
    assert refused.value.code == "malformed"


@pytest.mark.parametrize(("name", "target"), [("bamba", Bamba()), ("granite", GraniteHybrid())])
def test_automatic_head_size_follows_from_the_width(name: str, target: Bamba | GraniteHybrid) -> None:
    theirs = json.loads(json.dumps(target.config(architecture(model_config(name)), 64)))
    assert target.model(theirs | {"mamba_d_head": "auto"}) == target.model(theirs)
    with pytest.raises(ValueError, match="mamba_n_heads x mamba_d_head"):
        target.model(theirs | {"mamba_d_head": "auto", "mamba_n_heads": 3})


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("bamba", {"rotary_dim": 6}, "do not rotate half of each head"),
        ("bamba", {"rope": "none"}, "no rotary positions"),
        ("bamba", {"window": 8}, "a window"),
        ("granite", {}, "do not rotate half of each head"),
        ("llama", {}, "no mamba2 sub-layer"),
    ],
)
def test_models_of_another_shape_get_a_reason(name: str, options: dict[str, Any], reason: str) -> None:
    model = model_config(name)
    model.layers = {**model.layers, "A": {**model.layers["A"], **options}}
    assert reason in (NATIVE["BambaForCausalLM"](architecture(model), model.norm_eps) or "")
