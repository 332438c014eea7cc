"""Folders from transformers and state-spaces/mamba as checkpoints for a run to start from, and their export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.original import Original
from hybridtron.problems import Code, Unusable
from tests.interop.conftest import Stored
from tests.interop.models import CLASSES, MODELS, TOKENIZER, own_model
from tests.interop.refusals import refusal
from tests.slow import slow_except

Exported = Callable[[str], Path]


@pytest.fixture(scope="module")
def exported(stored: Stored, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return a function from a model's name to its exported folder, written once; a test that changes it copies it."""
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def written(name: str) -> Path:
        arguments = ["--checkpoint", str(stored(name).folder), "--output", str(folder / name), "--verify", "none"]
        assert main(["export", *arguments]) == 0
        return folder / name

    return written


def imported(folder: Path, output: Path) -> Checkpoint:
    assert main(["import", "--input", str(folder), "--output", str(output)]) == 0
    checkpoint = Checkpoint.open(output)
    assert not list(checkpoint.faults())
    return checkpoint


@pytest.mark.parametrize("name", slow_except(MODELS, *list(CLASSES)[::2]))
def test_import_restores_exported_weights_bit_for_bit(
    name: str, stored: Stored, exported: Exported, tmp_path: Path
) -> None:
    source = stored(name)
    back = imported(exported(name), tmp_path / "back")
    keys = [key for key in source.shapes if key in back.shapes]
    assert len(keys) == len(back.shapes)
    added_to_one = {key for key in keys if name.startswith("qwen3") and source.whole(key).ndim == 1 and "norm" in key}
    assert all(torch.equal(source.whole(key), back.whole(key)) for key in keys if key not in added_to_one)
    for key in added_to_one:
        torch.testing.assert_close(back.whole(key), source.whole(key), rtol=2**-23, atol=2**-23)
    assert {key for key in source.shapes if not key.startswith(("exp_avg", "random"))} == set(back.shapes)
    tokens_BL = torch.randint(80, (2, 25))
    ours, theirs = (own_model(checkpoint, torch.float32) for checkpoint in (source, back))
    with torch.no_grad():
        logits = [model(tokens_BL, None, SeqInfo.stream(2, 25)).output for model in (ours, theirs)]
    tolerance = 0.0
    if added_to_one:
        tolerance = 1e-5
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=tolerance)


ORIGINALS = {
    "mamba": ({"ssm_cfg": {}}, ("MM", {"M": {"kind": "mamba"}}, True)),
    "mamba2": (
        {"ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}},
        ("MM", {"M": {"kind": "mamba2", "state": 8, "head_dim": 8}}, True),
    ),
    "mamba2attn": (
        {
            "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8},
            "attn_layer_idx": [1],
            "attn_cfg": {
                "causal": True, "d_conv": 4, "head_dim": 12, "num_heads": 4, "out_proj_bias": False,
                "qkv_proj_bias": False, "rotary_emb_dim": 6,
            },
            "d_intermediate": 100,
        },
        (
            "M-A-",
            {
                "M": {"kind": "mamba2", "state": 8, "head_dim": 8},
                "A": {
                    "kind": "attention", "heads": 4, "head_dim": 12, "rotary_dim": 6, "rope": {"base": 10000.0},
                    "conv": 4, "conv_bias": True, "conv_silu": False,
                },
                "-": {"kind": "swiglu", "hidden": 128},
            },
            True,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINALS)
def test_format_of_the_reference_implementation_is_imported(name: str, tmp_path: Path) -> None:
    """Names by hand for one layer of each; our own table of rules makes the rest."""
    more, (pattern, layers, _) = ORIGINALS[name]
    settings = {"d_model": 32, "n_layer": 2, "vocab_size": 77, "rms_norm": True, "pad_vocab_size_multiple": 8, **more}
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    kind = Original()
    model = kind.model(settings)
    assert (model.pattern, model.vocab_size) == (pattern, 80)
    assert model.residual_fp32
    assert not kind.model({**settings, "residual_in_fp32": False}).residual_fp32
    assert architecture(model).specs == architecture(model.__class__(**{**vars(model), "layers": layers})).specs
    stored = {rule.theirs: torch.randn(rule.shape) for rule in kind.rules(architecture(model))}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert shapes["backbone.embedding.weight"] == (80, 32)
    if name == "mamba":
        assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (128, 32)
    else:
        assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (2 * 64 + 2 * 8 + 8, 32)
    if name == "mamba2attn":
        assert shapes["backbone.layers.1.mixer.in_proj.weight"] == (3 * 48, 32)
        assert shapes["backbone.layers.1.mixer.conv1d.weight"] == (3 * 48, 1, 4)
        assert shapes["backbone.layers.1.mlp.fc1.weight"] == (256, 32)
    torch.save({**stored, "lm_head.weight": stored["backbone.embedding.weight"]}, folder / "pytorch_model.bin")
    checkpoint = imported(folder, tmp_path / "checkpoint")
    x_z = stored["backbone.layers.0.mixer.in_proj.weight"]
    first_part = {"mamba": "x"}.get(name, "z")
    assert torch.equal(checkpoint.whole(f"layers.0.mixer.in_proj.weight.{first_part}"), x_z[:64])
    if name == "mamba2attn":
        up, gate = stored["backbone.layers.1.mlp.fc1.weight"].split(128)
        assert torch.equal(checkpoint.whole("layers.3.mixer.gate_up.weight.gate"), gate)
        assert torch.equal(checkpoint.whole("layers.3.mixer.gate_up.weight.up"), up)
        queries = stored["backbone.layers.1.mixer.in_proj.weight"][:48]
        assert torch.equal(checkpoint.whole("layers.2.mixer.q.weight"), queries)
    tokens_BL = torch.randint(77, (1, 9))
    with torch.no_grad():
        logits = own_model(checkpoint, torch.float32)(tokens_BL, None, SeqInfo.stream(1, 9)).output
    assert torch.isfinite(logits).all()


def refused(folder: Path, output: Path) -> Unusable:
    error = refusal(["import", folder, "--output", output])
    assert not output.exists()
    return error


def test_all_tensors_that_do_not_fit_are_reported(exported: Exported, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported("llama"), tmp_path / "out"))
    output = tmp_path / "back"
    file = folder / "model.safetensors"
    stored = load_file(file)
    wrong = {**stored, "extra.weight": torch.zeros(2), "model.norm.weight": torch.zeros(3)}
    del wrong["lm_head.weight"]
    save_file(wrong, file)
    error = refused(folder, output)
    assert error.code == "mismatch"
    for name in ("lm_head.weight", "extra.weight", "model.norm.weight"):
        assert name in str(error)
    save_file(stored, file)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert refused(folder, output).code == "no-file"
    file.write_bytes(file.read_bytes()[:100])
    error = refused(folder, output)
    assert error.code == "unreadable"
    assert str(error).startswith(f"{file} can't be read")
    file.unlink()
    error = refused(folder, output)
    assert error.code == "no-file"
    assert str(error).startswith(f"{folder} has no weights")


@pytest.mark.parametrize(
    ("name", "change", "code", "named"),
    [
        ("llama", {"rope_scaling": {"factor": 2.0}}, "unsupported", "factor=2.0"),
        ("llama", {"attention_bias": True}, "unsupported", "attention_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "unsupported", "hidden_act='gelu'"),
        ("granite", {"num_local_experts": 2**30}, "malformed", "num_local_experts"),
        ("granite", {"residual_multiplier": 0}, "malformed", "residual_multiplier"),
        ("granite", {"attention_multiplier": None}, "malformed", "attention_multiplier"),
        ("mamba", {"architectures": ["GPT2LMHeadModel"]}, "unsupported", "GPT2LMHeadModel"),
        ("mamba", {"state_size": None}, "malformed", "state_size"),
    ],
)
def test_unsupported_settings_are_refused(
    name: str, change: dict[str, Any], code: Code, named: str, exported: Exported, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported(name), tmp_path / "out"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    error = refused(folder, tmp_path / "back")
    assert error.code == code
    assert named in str(error)
