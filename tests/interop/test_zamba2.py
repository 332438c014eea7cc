"""Zamba2: folders that transformers wrote, and refused ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Zamba2Config, Zamba2ForCausalLM

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.interop.native_zamba2 import Zamba2
from hybridtron.interop.sample import sampled
from tests.interop.models import TOKENIZER, model_config
from tests.interop.parity import assert_same_logits

TYPES = ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "layers_block_type": TYPES, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "mamba_ngroups": 2, "mamba_d_state": 6, "n_mamba_heads": 8, "adapter_rank": 3, "rms_norm_eps": 1e-4,
    "chunk_size": 16,
}  # fmt: skip
VARIANTS = {
    "one block": {"use_mem_rope": True},
    "two in turn": {"num_mem_blocks": 2, "use_shared_attention_adapter": True},
    "adapted": {"use_mem_rope": True, "use_shared_attention_adapter": True, "mamba_ngroups": 1},
}

PATTERNS = {"two in turn": "MAMMBMAM"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_imported_folder_gives_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    theirs = Zamba2ForCausalLM(Zamba2Config(**{**SIZES, **VARIANTS[variant]})).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(TOKENIZER)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    imported = Checkpoint.open(tmp_path / "out")
    assert imported.config.model.pattern == PATTERNS.get(variant, "MAMMAMAM")
    assert imported.config.model.layers["M"]["dt_floor"] == 0.001
    assert export_class(architecture(imported.config.model), Export.auto) == "Zamba2ForCausalLM"
    assert_same_logits(imported, theirs, tokens=300)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"use_long_context": True}, "use_long_context"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"layers_block_type": ["hybrid", "attention", "hybrid", "mamba", "mamba"]}, "layers_block_type"),
        ({"layers_block_type": ["hybrid"]}, "layers_block_type"),
        ({"n_mamba_heads": 7}, "n_mamba_heads=7"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_mem_blocks": 50}, "num_mem_blocks=50"),
    ],
)
def test_unsupported_settings_are_refused(changed: dict[str, Any], named: str) -> None:
    theirs = json.loads(Zamba2Config(**SIZES).to_json_string(use_diff=False))
    Zamba2().model(theirs)
    with pytest.raises(ValueError, match=named):
        Zamba2().model({**theirs, **changed})


@pytest.mark.parametrize(
    ("pattern", "options", "reason"),
    [
        ("MAMAM", {"window": 8}, "a window"),
        ("MAMAM", {"heads": 4, "head_dim": 8}, "twice as wide"),
        ("MAMAM", {"kv_heads": 2}, "twice as wide"),
        ("MAMAM", {"rotary_dim": 4}, "rotate only a part of each head"),
        ("MAMAM", {"norm_eps": 1e-3}, "norm_eps"),
        ("MAMAMBM", {}, "in the order AAB, not in turn"),
        ("MAMBM-", {}, "not a mixture of mamba2 and shared_attention"),
        ("MM", {}, "not a mixture of mamba2 and shared_attention"),
    ],
)
def test_models_of_another_shape_get_a_reason(pattern: str, options: dict[str, Any], reason: str) -> None:
    model = model_config("zamba2")
    for letter in "AB":
        model.layers = {**model.layers, letter: {**model.layers[letter], **options}}
    model.layers = {**model.layers, "-": {"kind": "swiglu", "hidden": 8}}
    model.pattern = pattern
    assert reason in (NATIVE["Zamba2ForCausalLM"](architecture(model), model.norm_eps) or "")


def test_untied_model_is_exported_as_the_custom_class() -> None:
    model = model_config("zamba2")
    assert export_class(architecture(model), Export.auto) == "Zamba2ForCausalLM"
    model.tie_embeddings = False
    assert export_class(architecture(model), Export.auto) == SHIPPED
    with pytest.raises(CannotExport) as refused:
        export_class(architecture(model), Export.native)
    assert refused.value.code == "unsupported"


def test_sampled_layers_alternate_between_two_shared_blocks() -> None:
    model = model_config("zamba2")
    model.pattern = "MAMMBM" * 2 + "AM"
    arch = architecture(model)
    assert "".join(arch.letters[index] for index in sampled(arch, Zamba2())) == "MAMBMAMMBM"
