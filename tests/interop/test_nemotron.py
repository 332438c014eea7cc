"""Nemotron-H: folders that transformers wrote, published ones, and refused ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.config.hf_compat import NATIVE
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.native_nemotron import NemotronH
from tests.interop.conftest import Stored
from tests.interop.models import TOKENIZER, model_config, own_model
from tests.interop.parity import assert_same_logits, exported_as_it_was

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "vocab_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "layer_norm_epsilon": 1e-4,
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "time_step_min": 0.001,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mlp"],
}  # fmt: skip


def written(folder: Path, step: float, **settings: Any) -> NemotronHForCausalLM:
    """Write a folder by transformers itself, with weights far from their initial values; `step` is added to dt_bias."""
    torch.manual_seed(5)
    model = NemotronHForCausalLM(NemotronHConfig(**(SIZES | settings))).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            weight += 0.2 * torch.randn_like(weight)
            if name.endswith("dt_bias"):
                weight += step
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model


def logits_of(folder: Path, tokens_BL: torch.Tensor) -> torch.Tensor:
    model = own_model(Checkpoint.open(folder), torch.float32)
    with torch.no_grad():
        return model(tokens_BL, None, SeqInfo.stream(*tokens_BL.shape)).output.transpose(0, 1)


def test_imported_folder_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    theirs = written(tmp_path / "in", step=4.0)
    tokens_BL = torch.randint(48, (2, 70))
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    model = Checkpoint.open(tmp_path / "mid").config.model
    assert model.pattern == "M-A-M"
    assert export_class(architecture(model), Export.auto) == "NemotronHForCausalLM"
    with torch.no_grad():
        expected = theirs(tokens_BL).logits
    logits_BLV = logits_of(tmp_path / "mid", tokens_BL)
    torch.testing.assert_close(logits_BLV, expected, rtol=0, atol=1e-5 * expected.abs().max().item())

    assert exported_as_it_was(tmp_path) == model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_latent_size": 12},
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        {"n_group": 2, "topk_group": 2},
    ],
    ids=["plain", "latent", "groups", "all_groups"],
)
def test_imported_experts_give_the_logits_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = written(tmp_path / "in", 4.0, **EXPERTS, **settings)
    names = load_file(tmp_path / "in/model.safetensors").keys()
    assert "backbone.layers.3.mixer.experts.7.down_proj.weight" in names  # as in published folders
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    checkpoint = Checkpoint.open(tmp_path / "mid")
    model = checkpoint.config.model
    assert model.pattern == "MEAE-"
    assert_same_logits(checkpoint, theirs)
    assert exported_as_it_was(tmp_path) == model


def test_layers_for_further_tokens_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published folders of Nemotron 3 Super have such layers, which transformers leaves out, too."""
    theirs = written(tmp_path / "in", 4.0, **EXPERTS, moe_latent_size=12)
    file = tmp_path / "in/model.safetensors"
    further = {"mtp.layers.0.eh_proj.weight": torch.ones(32, 64), "mtp.layers.1.mixer.gate.weight": torch.ones(8, 32)}
    save_file(load_file(file) | further, file, {"format": "pt"})
    settings = json.loads((tmp_path / "in/config.json").read_text())
    settings |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
    (tmp_path / "in/config.json").write_text(json.dumps(settings))
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    assert "without layers for multi-token prediction" in capsys.readouterr().out
    assert_same_logits(Checkpoint.open(tmp_path / "mid"), theirs)
    assert main(["export", "--checkpoint", str(tmp_path / "mid"), "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(file).keys() - further.keys()


def test_small_steps_are_not_raised(tmp_path: Path) -> None:
    """transformers would raise small steps to `time_step_min`. After our export it reads the same small steps."""
    theirs = written(tmp_path / "in", step=-12.0)
    tokens_BL = torch.randint(48, (2, 70))
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    assert main(["export", "--checkpoint", str(tmp_path / "mid"), "--output", str(tmp_path / "out")]) == 0
    with torch.no_grad():
        logits_BLV = logits_of(tmp_path / "mid", tokens_BL)
        larger = theirs(tokens_BL).logits
        expected = NemotronHForCausalLM.from_pretrained(tmp_path / "out")(tokens_BL).logits
    torch.testing.assert_close(logits_BLV, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (larger - expected).abs().max() > 1e-4 * expected.abs().max()


def test_keys_of_published_folders_are_read(tmp_path: Path) -> None:
    """The pattern as text, another name for the size of a head, and code of their own, which is not run."""
    written(tmp_path / "in", step=0.0)
    settings = json.loads((tmp_path / "in/config.json").read_text())
    del settings["layers_block_type"]
    settings |= {
        "hybrid_override_pattern": "M-*-M",
        "time_step_limit": [0.0, float("inf")],
        "auto_map": {
            "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
            "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
        },
    }
    (tmp_path / "in/config.json").write_text(json.dumps(settings))
    for name in ("configuration", "modeling"):
        (tmp_path / f"in/{name}_nemotron_h.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0
    assert not (tmp_path / "ran").exists()
    model = Checkpoint.open(tmp_path / "mid").config.model
    assert model == NemotronH().model(json.loads(NemotronHConfig(**SIZES).to_json_string(use_diff=False)))
    del settings["head_dim"]
    assert NemotronH().model(settings | {"attention_head_dim": 12}) == model


KINDS = "M*-E"  # letters of hybrid_override_pattern


def layers_by_text(config: dict[str, Any]) -> dict[str, list[int]]:
    """The layers of each kind as vLLM reads a config.json: a letter of the text for each of `num_hidden_layers`."""
    letters = [config["hybrid_override_pattern"][index] for index in range(config["num_hidden_layers"])]
    return {kind: [index for index, letter in enumerate(letters) if letter == kind] for kind in KINDS}


def layers_by_converter(config: dict[str, Any]) -> dict[str, list[int]]:
    """The layers of each kind as llama.cpp's converter reads a config.json.

    It prefers the text. A model has either experts or dense MLPs, and one key says which.
    """
    has_experts = "num_experts_per_tok" in config
    pattern = config.get("hybrid_override_pattern") or config["layers_block_type"]
    names: dict[str, tuple[str, ...]] = {"M": ("mamba",), "*": ("attention",), "-": (), "E": ("moe",)}
    if isinstance(pattern, str):
        names = {"M": ("M",), "*": ("*",), "-": () if has_experts else ("-",), "E": ("E",) if has_experts else ()}
    assert len(pattern) == config["num_hidden_layers"]
    return {kind: [index for index, layer in enumerate(pattern) if layer in names[kind]] for kind in KINDS}


def layers_by_list(config: dict[str, Any]) -> dict[str, list[int]]:
    """The layers of each kind as transformers reads a config.json."""
    types = NemotronHConfig.from_dict(config).layers_block_type
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return {kind: [index for index, layer in enumerate(types) if layer == name] for kind, name in names.items()}


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-experts"])
@pytest.mark.parametrize("read", [layers_by_text, layers_by_converter, layers_by_list])
def test_other_readers_see_the_same_layers_in_an_export(
    read: Callable[[dict[str, Any]], dict[str, list[int]]], name: str, stored: Stored, tmp_path: Path
) -> None:
    source = stored(name)
    assert (
        main(["export", "--checkpoint", str(source.folder), "--output", str(tmp_path / "out"), "--verify", "none"]) == 0
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    letters = dict(zip("MA-E", KINDS, strict=True))
    pattern = [letters[letter] for letter in source.config.model.pattern]
    assert {"M", "*"} < set(pattern)
    assert read(config) == {kind: [index for index, letter in enumerate(pattern) if letter == kind] for kind in KINDS}


def test_tensor_names_of_transformers_in_memory_are_imported(tmp_path: Path) -> None:
    written(tmp_path / "in", step=0.0)
    file = tmp_path / "in/model.safetensors"
    save_file({key.replace("backbone.", "model."): value for key, value in load_file(file).items()}, file)
    assert main(["import", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "mid")]) == 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layers_block_type": ["mamba", "moe", "dense", "attention"]}, "layers_block_type"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MEM"}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "mlp"]}, "layers_block_type"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"use_conv_bias": False}, "use_conv_bias=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({**EXPERTS, "n_shared_experts": 2}, "n_shared_experts=2"),
        ({**EXPERTS, "n_routed_experts": 2**16}, "65536 experts in 5 layers"),
    ],
)
def test_unsupported_settings_are_refused(changed: dict[str, Any], named: str) -> None:
    theirs = json.loads(NemotronHConfig(**SIZES).to_json_string(use_diff=False))
    NemotronH().model(theirs)
    with pytest.raises(ValueError, match=named):
        NemotronH().model({**theirs, **changed})


def with_options(letter: str, **options: Any) -> ModelConfig:
    model = model_config("nemotron_h")
    return replace(model, layers={**model.layers, letter: {**model.layers[letter], **options}})


def with_experts(**options: Any) -> ModelConfig:
    model = model_config("nemotron_h-experts")
    return replace(model, layers={**model.layers, "E": {**model.layers["E"], **options}})


OTHERS = {
    "has rotary positions": with_options("A", rope={"base": 100.0}),
    "has a window": with_options("A", window=8),
    "has qk_norm=head, not none": with_options("A", qk_norm="head"),
    "norm_eps=0.001, not model": with_options("M", norm_eps=1e-3),
    "squared_relu sub-layers have their norm after them": with_options("-", norm_after=True),
    "swiglu is none of mamba2, squared_relu, moe and attention": with_options("-", kind="swiglu"),
    "no mamba2 sub-layer": replace(model_config("nemotron_h"), pattern="A-"),
    "no squared_relu or moe sub-layer": replace(model_config("nemotron_h"), pattern="MA"),
    "no attention sub-layer": replace(model_config("nemotron_h"), pattern="M-"),
    "its head is tied": replace(model_config("nemotron_h"), tie_embeddings=True),
}


OTHERS |= {
    "its experts have activation=swiglu": with_experts(activation="swiglu"),
    "its experts have scores=softmax": with_experts(scores="softmax"),
    "its experts have balance=auxiliary": with_experts(balance="auxiliary"),
    "its experts have shared_gate=True": with_experts(shared_gate=True),
    "its experts have no shared expert": with_experts(shared=0),
    "its groups of experts have one expert each": with_experts(groups=8, group_limit=4),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_models_of_another_shape_are_exported_as_the_custom_class(reason: str) -> None:
    model = OTHERS[reason]
    assert export_class(architecture(model), Export.auto) == SHIPPED
    with pytest.raises(CannotExport, match=reason) as refused:
        export_class(architecture(model), Export.native)
    assert refused.value.code == "unsupported"


def test_heads_of_another_width_do_not_fit_mamba2() -> None:
    heads = {"kind": "mamba2", "state": 8, "head_dim": 8, "heads": 6}
    alone = ModelConfig(32, 48, "M", {"M": heads})
    assert export_class(architecture(alone), Export.auto) == SHIPPED
    assert (
        export_class(architecture(replace(alone, layers={"M": {**heads, "heads": 8}})), Export.auto)
        == "Mamba2ForCausalLM"
    )
    assert set(NATIVE) >= {"Mamba2ForCausalLM", "NemotronHForCausalLM"}
