"""A model with experts that starts from a folder of transformers, after its import."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM, PreTrainedModel

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import train
from hybridtron.cli.convert import main
from hybridtron.data.prepare.writer import write_folder
from hybridtron.train.start import check_same_weights
from hybridtron.train.upcycled import upcycled_layers
from tests.interop.conftest import Stored
from tests.interop.models import TOKENIZER
from tests.interop.parity import assert_same_logits

VOCAB = 48
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=40, vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
NEMOTRON = NemotronHConfig(
    hidden_size=32, intermediate_size=40, vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
    layers_block_type=["mamba", "mlp", "attention", "mlp"], mamba_num_heads=6, mamba_head_dim=8, n_groups=2,
    ssm_state_size=6, time_step_min=1e-30, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MODELS = {"llama": (LlamaForCausalLM, LLAMA), "nemotron_h": (NemotronHForCausalLM, NEMOTRON)}


def written(name: str, folder: Path) -> PreTrainedModel:
    """Write a dense model by transformers, with weights far from their initial values."""
    torch.manual_seed(5)
    kind, settings = MODELS[name]
    model = kind(settings).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model


def experts_for(model: ModelConfig, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the letter of a model's MLP, with the options of four experts of the MLP's size."""
    (letter,) = (name for name, dense in model.layers.items() if dense["kind"] in ("swiglu", "squared_relu"))
    dense = model.layers[letter]
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": dense["hidden"], "activation": dense["kind"]}
    return {letter: {**experts, **options}}


def train_one_step(imported: Path, experts: dict[str, dict[str, Any]], run: Path) -> Checkpoint:
    """Start a run with an imported folder's weights, and return its checkpoint after a step that changes no weight."""
    data = run.with_name("data")
    documents = [np.arange(start, start + 30) % VOCAB for start in range(40)]
    splits = {split: {"text": documents} for split in ("train", "validation")}
    write_folder(data, splits, TOKENIZER, VOCAB, VOCAB - 1, {"text": "counting"})
    arguments = [f"run.weights={imported}", "model=from_checkpoint", f"run.dir={run}"]
    for letter, options in experts.items():
        listed = ", ".join(f"{name}: {value}" for name, value in options.items())
        arguments.append(f"model.layers.{letter}={{{listed}}}")
    arguments += ["data=folder", f"data.path={data}", "data.epochs=null", "run.sample_tokens=0"]
    arguments += ["phases.0.seq_len=16", "phases.0.global_batch=2", "phases.0.micro_batch=2", "phases.0.tokens=320"]
    arguments += ["phases.0.lr=1e-30", "optim.final_lr=1", "run.max_steps=1", "run.eval_tokens=64"]
    assert train.main(arguments) == 0
    return Checkpoint.open(folder_of(run, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("nemotron_h", {"scores": "sigmoid", "balance": "bias", "scale": 2.5, "shared": 24})],
)
def test_first_logits_of_experts_are_those_of_the_imported_model(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = written(name, tmp_path / "dense")
    assert main(["import", "--input", str(tmp_path / "dense"), "--output", str(tmp_path / "imported")]) == 0
    experts = experts_for(Checkpoint.open(tmp_path / "imported").config.model, **options)
    upcycled = train_one_step(tmp_path / "imported", experts, tmp_path / "run")
    assert [spec.kind for spec in architecture(upcycled.config.model).specs].count("moe") == 2
    assert_same_logits(upcycled, theirs)


def test_experts_start_as_copies_of_imported_weights(stored: Stored, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    assert (
        main(["export", "--checkpoint", str(stored("llama").folder), "--output", str(exported), "--verify", "none"])
        == 0
    )
    assert main(["import", "--input", str(exported), "--output", str(tmp_path / "imported")]) == 0
    checkpoint = Checkpoint.open(tmp_path / "imported")
    model = checkpoint.config.model
    arch = architecture(dataclasses.replace(model, layers={**model.layers, **experts_for(model)}))
    lines = check_same_weights(checkpoint, arch, "run.weights", may_grow=True)
    assert any("each of 4 experts starts as a copy" in line for line in lines)
    layer = upcycled_layers(checkpoint.plan.arch, arch)[0]
    read = checkpoint.weights(checkpoint.plan.arch.table, unrounded=True)
    name = f"{layer.prefix}gate_up"
    copies = layer.value(name, arch.table[name], 0, read)
    assert copies.shape == (4, 2 * layer.spec.hidden, model.width)
    assert torch.equal(copies[3], read(f"{layer.prefix}gate_up.weight"))
