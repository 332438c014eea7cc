"""Imported models with scaled rotary positions: logits agree with transformers, unknown scalings are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import RopeOptions
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.rope_parameters import to_ours
from tests.interop.models import TOKENIZER, own_model

LLAMA_31 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5}
LINEAR = {"factor": 2.5, "type": "linear"}


@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize("scaling", [LLAMA_31, YARN, LINEAR], ids=["llama3", "yarn", "linear"])
def test_imported_llama_gives_the_logits_of_transformers(scaling: dict[str, Any], former: bool, tmp_path: Path) -> None:
    """Use Llama 3.1's published config.json, and the form that transformers 5 writes."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 80, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 500.0, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 3,
    }  # fmt: skip
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, rope_scaling=dict(scaling))).eval()
    for weight in theirs.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    folder = tmp_path / "llama"
    theirs.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["rope_parameters"]["rope_type"] == scaling.get("rope_type", scaling.get("type"))
    if former:
        del written["rope_parameters"]
        (folder / "config.json").write_text(json.dumps({**written, "rope_scaling": scaling, "rope_theta": 500.0}))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    assert main(["import", "--input", str(folder), "--output", str(tmp_path / "checkpoint")]) == 0
    ours = own_model(Checkpoint.open(tmp_path / "checkpoint"), torch.float32)
    tokens_BL = torch.randint(80, (2, 100))
    with torch.no_grad():
        logits = ours(tokens_BL, None, SeqInfo.stream(2, 100)).output.transpose(0, 1)
        expected = theirs(tokens_BL).logits
        plain = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        plain.load_state_dict(theirs.state_dict())
        unscaled = plain(tokens_BL).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (unscaled - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type=dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type=longrope"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.1}, "attention_factor=1.1"),
        ({"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_unsupported_scalings_are_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        to_ours({"rope_parameters": rope, "rope_theta": 1e4, "max_position_embeddings": 64})


def test_missing_keys_take_the_defaults_of_transformers() -> None:
    silent = {"rope_scaling": {"type": "yarn", "factor": None}, "max_position_embeddings": 4096}
    scaled = to_ours({**silent, "original_max_position_embeddings": 1024})
    assert scaled == {"base": 10000.0, "scale": "yarn", "factor": 4.0, "original": 1024}
    assert to_ours({}) == {"base": 10000.0}
    assert to_ours({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}) == "none"


def test_former_key_rope_base_is_read() -> None:
    def spec(**options: Any) -> Any:
        layers = {"A": {"kind": "attention", "heads": 2, **options}}
        return architecture(ModelConfig(width=32, vocab_size=8, pattern="A", layers=layers)).specs[0]

    assert spec(rope_base=5e5) == spec(rope={"base": 5e5})
    assert spec(rope_base=None) == spec(rope="none")
    assert spec(rope_base=5e5, rope={"scale": "linear", "factor": 2.0}).rope == RopeOptions(5e5, "linear", 2.0)
