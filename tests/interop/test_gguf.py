"""GGUF files of exports, read back with the package `gguf`: every key, and every tensor as computed by index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, trainers
from torch import Tensor

from hybridtron.cli.main import main
from hybridtron.config.export_class import RECORD
from hybridtron.data.pre_tokenizers import PATTERNS, pre_tokenizer
from hybridtron.interop.gguf_file import write_gguf
from hybridtron.interop.gguf_vocabulary import CannotConvert
from tests.interop.conftest import Stored
from tests.interop.models import VOCAB

gguf = pytest.importorskip("gguf")
TEXTS = ["a red cat sat on a tree, and 1234 red trees sat on a cat"] * 3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
HEADS, KV_HEADS = 4, 2  # of the attention in models.py
GROUPS = 2  # of Mamba-2 there
NAMES = {
    "blk.{}.attn_norm.weight": ("norm", "input_layernorm"),
    "blk.{}.ssm_in.weight": ("in_proj",),
    "blk.{}.ssm_x.weight": ("x_proj",),
    "blk.{}.ssm_out.weight": ("out_proj",),
    "blk.{}.attn_v.weight": ("v_proj",),
    "blk.{}.attn_output.weight": ("o_proj",),
    "blk.{}.ffn_gate.weight": ("gate_proj",),
    "blk.{}.ffn_up.weight": ("up_proj",),
    "blk.{}.ffn_down.weight": ("down_proj", "output_linear"),
}


def trained(name: str = "gpt-2", size: int = 60) -> Tokenizer:
    """A tokenizer of byte pairs with two special tokens, which leaves ids of the model free."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(name)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>", "<|pad|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


Exported = Callable[..., Path]


@pytest.fixture
def exported(stored: Stored, tmp_path: Path) -> Exported:
    """Return a function that exports a model with a tokenizer of byte pairs."""

    def written(name: str, *options: str, tokenizer: str | None = None) -> Path:
        folder = tmp_path / "out"
        arguments = ["export", str(stored(name).folder), "--output", str(folder), "--verify", "none", *options]
        assert main(arguments) == 0
        (folder / "tokenizer.json").write_text(tokenizer or trained().to_str())
        tokens = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        return folder

    return written


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Return a file's keys, its tensors as fp32, and the type of each tensor."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return keys, tensors, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def paired(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows for llama.cpp's rotary pairs, row by row."""
    size = weight.shape[0] // heads
    ordered = torch.empty_like(weight)
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                ordered[head * size + 2 * pair + half] = weight[head * size + half * (size // 2) + pair]
    return ordered


def multiplied(weight: Tensor, end: str, config: dict[str, Any]) -> Tensor:
    """Multiply a weight of Falcon-H1 by its factors, row by row for the projection to z, x, B, C and dt."""
    gate, down = config["mlp_multipliers"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "k_proj": config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
    }
    if end != "in_proj":
        return weight * factors.get(end, 1.0)
    heads = config["mamba_n_heads"]
    sizes = [heads * config["mamba_d_head"]] * 2 + [config["mamba_n_groups"] * config["mamba_d_state"]] * 2 + [heads]
    by_row = [factor for size, factor in zip(sizes, config["ssm_multipliers"], strict=True) for _ in range(size)]
    return weight * torch.tensor(by_row)[:, None]


def expected(folder: Path) -> dict[str, Tensor]:
    """Compute llama.cpp's tensors from the folder's."""
    config = json.loads((folder / "config.json").read_text())
    is_falcon = config["model_type"] == "falcon_h1"
    wanted: dict[str, Tensor] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        path = name.removesuffix(".weight").split(".")
        end = path[-1]
        layer = next((part for part in path if part.isdigit()), "")
        weight = multiplied(stored, end, config) if is_falcon else stored.float()
        is_inner = "mixer" in path or "mamba" in path
        if end in ("embeddings", "embed_tokens"):
            wanted["token_embd.weight"] = weight
        elif end == "lm_head":
            wanted["output.weight"] = weight
        elif not layer:
            wanted["output_norm.weight"] = weight
        elif name.endswith("A_log"):
            wanted[f"blk.{layer}.ssm_a"] = -torch.exp(weight)
        elif name.endswith(".D"):
            wanted[f"blk.{layer}.ssm_d"] = weight
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            wanted[f"blk.{layer}.ssm_dt.bias"] = weight
        elif end == "dt_proj":
            wanted[f"blk.{layer}.ssm_dt.weight"] = weight
        elif name.endswith("conv1d.bias"):
            wanted[f"blk.{layer}.ssm_conv1d.bias"] = weight
        elif end == "conv1d":
            wanted[f"blk.{layer}.ssm_conv1d.weight"] = weight[:, 0]
        elif end == "norm" and is_inner:
            wanted[f"blk.{layer}.ssm_norm.weight"] = weight.view(GROUPS, -1)
        elif end == "post_attention_layernorm":
            wanted[f"blk.{layer}.ffn_norm.weight"] = weight
        elif end == "pre_ff_layernorm":
            wanted[f"blk.{layer}.ffn_norm"] = weight
        elif end in ("q_proj", "k_proj"):
            heads = HEADS if end == "q_proj" else KV_HEADS
            wanted[f"blk.{layer}.attn_{end[0]}.weight"] = weight if is_falcon else paired(weight, heads)
        elif end == "input_linear":
            wanted[f"blk.{layer}.ffn_gate.weight"] = weight[: len(weight) // 2]
            wanted[f"blk.{layer}.ffn_up.weight"] = weight[len(weight) // 2 :]
        else:
            theirs = next(theirs for theirs, ends in NAMES.items() if end in ends)
            wanted[theirs.format(layer)] = weight
    if config["model_type"] != "mamba":
        for name in wanted:
            if name.endswith(("ssm_a", "ssm_d")):
                wanted[name] = wanted[name][:, None]
    return wanted


MAMBA_KEYS = {
    "vocab_size": VOCAB,
    "block_count": 2,
    "embedding_length": 32,
    "context_length": 2**20,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "ssm.inner_size": 64,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
}
MAMBA2_SIZES = {"ssm.conv_kernel": 3, "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.group_count": GROUPS}
HYBRID_KEYS = {
    "vocab_size": VOCAB,
    "embedding_length": 32,
    "feed_forward_length": 56,
    "attention.head_count": HEADS,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
    "rope.freq_base": 10000.0,
    **MAMBA2_SIZES,
}
HEADS_OF_8 = {"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8}
HEADS_OF_16 = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


def scales(*values: float) -> dict[str, Any]:
    return {key: pytest.approx(value) for key, value in zip(SCALES, values, strict=True)}


# by model: the architecture, and all its keys
KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": (
        "mamba",
        {
            **MAMBA_KEYS,
            "ssm.conv_kernel": 3,
            "ssm.state_size": 4,
            "ssm.time_step_rank": 5,
            "ssm.dt_b_c_rms": False,
        },
    ),
    "mamba-untied": (
        "mamba",
        {
            **MAMBA_KEYS,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 4,
            "ssm.time_step_rank": 2,
            "ssm.dt_b_c_rms": False,
        },
    ),
    "mamba2": ("mamba2", {**MAMBA_KEYS, **MAMBA2_SIZES, "ssm.time_step_rank": 8}),
    "granite": (
        "granitehybrid",
        {
            **HYBRID_KEYS,
            **HEADS_OF_8,
            **scales(8**-0.5, 1, 1, 1),
            "block_count": 3,
            "attention.head_count_kv": [0, KV_HEADS, 0],
            "ssm.time_step_rank": 8,
            "context_length": 24,
            "rope.scaling.finetuned": True,
        },
    ),
    "granite-scaled": (
        "granitehybrid",
        {
            **HYBRID_KEYS,
            **HEADS_OF_8,
            **scales(0.1, 12, 0.22, 8),
            "block_count": 2,
            "attention.head_count_kv": [0, KV_HEADS],
            "ssm.time_step_rank": 8,
            "context_length": 2**20,
            "rope.scaling.finetuned": False,
        },
    ),
    "falcon_h1": (
        "falcon-h1",
        {
            **HYBRID_KEYS,
            **HEADS_OF_16,
            "block_count": 2,
            "attention.head_count_kv": KV_HEADS,
            "ssm.inner_size": 48,
            "ssm.time_step_rank": 6,
            "context_length": 24,
        },
    ),
    "falcon_h1-normed": (
        "falcon-h1",
        {
            **HYBRID_KEYS,
            **HEADS_OF_8,
            "block_count": 1,
            "attention.head_count_kv": KV_HEADS,
            "ssm.time_step_rank": 8,
            "context_length": 24,
        },
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_and_every_tensor_is_read_back(name: str, exported: Exported, tmp_path: Path) -> None:
    folder = exported(name)
    output = tmp_path / "model.gguf"
    assert main(["gguf", str(folder), "--output", str(output)]) == 0
    keys, tensors, types = read(output)
    arch, wanted_keys = KEYS[name]
    assert keys.pop("general.architecture") == arch
    assert keys.pop("general.name") == "out"
    assert keys.pop("general.type") == "model"
    assert keys.pop("general.quantization_version") == 2
    assert keys.pop("general.file_type") == gguf.LlamaFileType.ALL_F32
    of_model = {key.removeprefix(f"{arch}."): keys[key] for key in keys if not key.startswith("tokenizer.")}
    assert of_model == wanted_keys
    wanted = expected(folder)
    assert tensors.keys() == wanted.keys()
    for tensor, values in wanted.items():
        assert tensors[tensor].shape == tuple(values.shape), tensor
        assert np.array_equal(tensors[tensor], values.numpy()), tensor
    assert set(types.values()) == {"F32"}


def test_matrices_keep_bf16(exported: Exported, tmp_path: Path) -> None:
    folder = exported("falcon_h1", "--dtype", "bfloat16")
    write_gguf(folder, tmp_path / "model.gguf", lambda done, total: None)
    keys, tensors, types = read(tmp_path / "model.gguf")
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    in_fp32 = {name.split(".", 2)[-1] for name, kind in types.items() if kind == "F32"}
    assert in_fp32 == {
        "weight",  # output_norm.weight
        "attn_norm.weight",
        "ffn_norm",
        "ssm_a",
        "ssm_conv1d.bias",
        "ssm_conv1d.weight",
        "ssm_d",
        "ssm_dt.bias",
    }
    assert set(types.values()) == {"F32", "BF16"}
    for name, values in expected(folder).items():
        rounded = values.float() if types[name] == "F32" else values.float().bfloat16().float()
        assert np.array_equal(tensors[name], rounded.numpy()), name


def test_head_with_a_multiplier_of_its_own_is_written_beside_a_tied_embedding(
    exported: Exported, tmp_path: Path
) -> None:
    folder = exported("falcon_h1-normed")
    config = json.loads((folder / "config.json").read_text()) | {"lm_head_multiplier": 0.25}
    (folder / "config.json").write_text(json.dumps(config))
    write_gguf(folder, tmp_path / "model.gguf", lambda done, total: None)
    tensors = read(tmp_path / "model.gguf")[1]
    assert np.array_equal(tensors["output.weight"], 0.25 * tensors["token_embd.weight"])


@pytest.mark.parametrize("splits_by", PATTERNS)
def test_the_tokenizer_is_read_back(splits_by: str, exported: Exported, tmp_path: Path) -> None:
    tokenizer = trained(splits_by)
    folder = exported("mamba", tokenizer=tokenizer.to_str())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_gguf(folder, tmp_path / "model.gguf", lambda done, total: None)
    keys = read(tmp_path / "model.gguf")[0]
    of_tokenizer = {key.removeprefix("tokenizer."): keys[key] for key in keys if key.startswith("tokenizer.")}
    size = tokenizer.get_vocab_size()
    assert of_tokenizer.pop("ggml.tokens") == [
        *(tokenizer.id_to_token(number) for number in range(size)),
        *(f"[PAD{number}]" for number in range(size, VOCAB)),
    ]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    assert len(merges) > 5
    assert of_tokenizer == {
        "ggml.model": "gpt2",
        "ggml.pre": splits_by,
        "ggml.token_type": [3, 3, *[1] * (size - 2), *[5] * (VOCAB - size)],  # control, normal, unused
        "ggml.merges": merges,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0,
        "ggml.padding_token_id": 1,
        "ggml.add_bos_token": False,
        "ggml.add_eos_token": False,
        "chat_template": TEMPLATE,
    }


def changed(tokenizer: Tokenizer, model: dict[str, Any] | None = None, **entries: Any) -> str:
    parsed = json.loads(tokenizer.to_str()) | entries
    parsed["model"] |= model or {}
    return json.dumps(parsed)


SPACED = [{"id": 0, "content": "<|endoftext|>", "special": True, "lstrip": True, "rstrip": False}]
SPACED[0] |= {"single_word": False, "normalized": False}


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (changed(trained(), normalizer={"type": "NFC"}), "normalizes"),
        (changed(trained(), pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (changed(trained(), model={"ignore_merges": True}), "ignore_merges"),
        (changed(trained(), model={"end_of_word_suffix": "</w>"}), "end_of_word_suffix"),
        (changed(trained("llama-bpe"), model={"merges": []}), "takes whole"),
        (changed(trained(), added_tokens=SPACED), "spaces beside it"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(
    tokenizer: str, words: str, exported: Exported, tmp_path: Path
) -> None:
    folder = exported("mamba", tokenizer=tokenizer)
    with pytest.raises(CannotConvert, match=words) as refused:
        write_gguf(folder, tmp_path / "model.gguf", lambda done, total: None)
    assert refused.value.code == "unsupported"
    assert not list(tmp_path.glob("*gguf*"))


@pytest.mark.parametrize(
    ("name", "entries", "words"),
    [
        ("mamba", {"expand": 4}, "only if `expand` = 2"),
        ("granite-yarn", {}, "RoPE is not scaled"),
        ("llama", {}, "has the class LlamaForCausalLM"),
        ("samba", {}, "has the class HybridtronForCausalLM"),
    ],
)
def test_models_that_llama_cpp_lacks_are_refused(
    name: str, entries: dict[str, Any], words: str, exported: Exported, tmp_path: Path
) -> None:
    folder = exported(name)
    config = json.loads((folder / "config.json").read_text())
    if entries:
        weights = load_file(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | entries))
        save_file({key: wider(key, weight) for key, weight in weights.items()}, folder / "model.safetensors")
    with pytest.raises(CannotConvert, match=words) as refused:
        write_gguf(folder, tmp_path / "model.gguf", lambda done, total: None)
    assert refused.value.code == "unsupported"


def wider(name: str, weight: Tensor) -> Tensor:
    """Make a weight of Mamba with twice the inner channels."""
    if ".mixer." not in name:
        return weight
    if name.endswith(("out_proj.weight", "x_proj.weight")):
        return torch.cat([weight, weight], 1).contiguous()
    return torch.cat([weight, weight]).contiguous()


def test_other_folders_are_refused(exported: Exported, tmp_path: Path) -> None:
    folder = exported("mamba")
    (folder / RECORD).unlink()
    with pytest.raises(CannotConvert, match=RECORD) as refused:
        write_gguf(folder, tmp_path / "model.gguf", lambda done, total: None)
    assert refused.value.code == "no-file"
