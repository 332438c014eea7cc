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
from hybridtron.config.exportable import SHIPPED, CannotExport, export_class
from hybridtron.config.native_fits import NATIVE
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_that_transformers_wrote_is_the_same_model_here(variant: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    theirs = Zamba2ForCausalLM(Zamba2Config(**{**SIZES, **VARIANTS[variant]})).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(TOKENIZER)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    found = Checkpoint.open(tmp_path / "out")
    assert found.config.model.pattern == ("MAMMBMAM" if variant == "two in turn" else "MAMMAMAM")
    assert found.config.model.layers["M"]["dt_floor"] == 0.001
    assert export_class(found.config.model, Export.auto) == "Zamba2ForCausalLM"
    assert_same_logits(found, theirs, tokens=300)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"use_long_context": True}, "use_long_context"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"layers_block_type": ["hybrid", "attention", "hybrid", "mamba", "mamba"]}, "layers_block_type"),
        ({"layers_block_type": ["hybrid"]}, "1 entries"),
        ({"n_mamba_heads": 7}, "n_mamba_heads=7"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_mem_blocks": 50}, "num_mem_blocks=50"),
    ],
)
def test_what_is_not_ours_is_refused(changed: dict[str, Any], said: str) -> None:
    theirs = json.loads(Zamba2Config(**SIZES).to_json_string(use_diff=False))
    Zamba2().model(theirs)
    with pytest.raises(ValueError, match=said):
        Zamba2().model({**theirs, **changed})


@pytest.mark.parametrize(
    ("pattern", "options", "said"),
    [
        ("MAMAM", {"window": 8}, "a window"),
        ("MAMAM", {"heads": 4, "head_dim": 8}, "twice as wide"),
        ("MAMAM", {"kv_heads": 2}, "twice as wide"),
        ("MAMAM", {"rotary_dim": 4}, "turn a part of each head"),
        ("MAMAM", {"norm_eps": 1e-3}, "norm_eps"),
        ("MAMAMBM", {}, "AAB do not stand in turn"),
        ("MAMBM-", {}, "mamba2 and shared_attention, both"),
        ("MM", {}, "mamba2 and shared_attention, both"),
    ],
)
def test_what_is_no_zamba2(pattern: str, options: dict[str, Any], said: str) -> None:
    model = model_config("zamba2")
    model.layers = {letter: {**each, **(options if letter in "AB" else {})} for letter, each in model.layers.items()}
    model.layers = {**model.layers, "-": {"kind": "swiglu", "hidden": 8}}
    model.pattern = pattern
    assert said in (NATIVE["Zamba2ForCausalLM"](architecture(model), model.norm_eps) or "")


def test_a_model_with_a_head_of_its_own_is_shipped() -> None:
    model = model_config("zamba2")
    model.tie_embeddings = False
    assert export_class(model, Export.auto) == SHIPPED
    with pytest.raises(CannotExport, match="Zamba2ForCausalLM: it shares no weights where the head has its own"):
        export_class(model, Export.native)


def test_the_sampled_layers_of_two_blocks_are_in_turn() -> None:
    model = model_config("zamba2")
    model.pattern = "MAMMBM" * 2 + "AM"
    arch = architecture(model)
    assert "".join(arch.letters[index] for index in sampled(arch, Zamba2())) == "MAMBMAMMBM"
