"""Small models for every class that transformers has, as checkpoints with weights far from their initial values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.interop.verify import in_fp32, whole_model
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import Groups
from tests.conftest import small_run

VOCAB = 80
WIDTH = 32
TOKENIZER = json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})  # the least there can be
MLP = {"kind": "swiglu", "hidden": 56}
ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2}
MAMBA2 = {"kind": "mamba2", "state": 8, "head_dim": 8, "groups": 2, "conv": 3}
GATED_EXPERTS = {"kind": "moe", "experts": 6, "top_k": 2, "hidden": 24, "shared": 40}
MODELS: dict[str, tuple[str, dict[str, dict[str, Any]], bool]] = {
    "mamba": ("M*2", {"M": {"kind": "mamba", "state": 4, "conv": 3, "dt_rank": 5}}, True),
    "mamba-untied": ("M*2", {"M": {"kind": "mamba", "state": 4}}, False),
    "mamba2": ("M*2", {"M": MAMBA2}, True),
    "llama": ("(A-)*2", {"A": {**ATTENTION, "rope": {"base": 5000.0}}, "-": MLP}, False),
    "llama-tied": ("(A-)*2", {"A": {**ATTENTION, "head_dim": 12}, "-": MLP}, True),
    "mistral": ("(W-)*2", {"W": {**ATTENTION, "kv_heads": 1, "window": 9}, "-": MLP}, False),
    "granite": ("M-A-M-", {"M": MAMBA2, "A": ATTENTION, "-": MLP}, True),
    "llama-llama3": (
        "(A-)*2",
        {
            "A": {**ATTENTION, "rope": {"base": 100.0, "scale": "llama3", "factor": 4.0, "original": 20, "high": 3.0}},
            "-": MLP,
        },
        False,
    ),
    "llama-yarn": (
        "(A-)*2",
        {"A": {**ATTENTION, "rope": {"base": 100.0, "scale": "yarn", "factor": 4.0, "original": 8}}, "-": MLP},
        False,
    ),
    "mistral-linear": (
        "(W-)*2",
        {"W": {**ATTENTION, "window": 9, "rope": {"scale": "linear", "factor": 4.0}}, "-": MLP},
        False,
    ),
    "granite-yarn": (
        "M-A-",
        {
            "M": MAMBA2,
            "A": {
                **ATTENTION,
                "rope": {
                    "scale": "yarn",
                    "factor": 3.0,
                    "original": 9,
                    "fast": 8.0,
                    "slow": 0.5,
                    "attention": 1.4,
                    "truncate": False,
                },
            },
            "-": MLP,
        },
        True,
    ),
    "bamba": ("M-A-M-", {"M": MAMBA2, "A": {**ATTENTION, "rotary_dim": 4}, "-": MLP}, False),
    "bamba-yarn": (
        "A-M-",
        {
            "M": MAMBA2,
            "A": {
                **ATTENTION,
                "head_dim": 12,
                "rotary_dim": 6,
                "rope": {"scale": "yarn", "factor": 4.0, "original": 8},
            },
            "-": MLP,
        },
        True,
    ),
    "granite-scaled": (
        "M-A-",
        {"M": MAMBA2, "A": {**ATTENTION, "rope": "none", "scale": 0.1}, "-": MLP},
        True,
    ),
    "dense_granite": ("(A-)*2", {"A": {**ATTENTION, "head_dim": 12, "scale": 0.125}, "-": MLP}, False),
    "granite-experts": ("M-A-M-", {"M": MAMBA2, "A": {**ATTENTION, "rope": "none"}, "-": GATED_EXPERTS}, True),
    "granite-nope": ("M-A-", {"M": MAMBA2, "A": {**ATTENTION, "rope": "none"}, "-": MLP}, False),
}
DELTA = {"kind": "gated_deltanet", "heads": 4, "key_heads": 2, "expand_k": 1.5, "expand_v": 2.0, "conv": 3}
NORMED = {**ATTENTION, "qk_norm": "all", "norm_after": True}
GATED = {**ATTENTION, "qk_norm": "head", "gate": True, "head_dim": 12, "rotary_dim": 6}
BEHIND = {**MLP, "norm_after": True}
MODELS |= {
    "olmo_hybrid": (
        "D-A+D-",
        {"D": {**DELTA, "negative_eigenvalues": True}, "A": {**NORMED, "rope": "none"}, "-": MLP, "+": BEHIND},
        False,
    ),
    "olmo_hybrid-rope": ("D-A+", {"D": DELTA, "A": {**NORMED, "head_dim": 12}, "-": MLP, "+": BEHIND}, True),
    "qwen3_5": ("D-A-", {"D": DELTA, "A": GATED, "-": MLP}, False),
    "qwen3_next": (
        "DED-AE",
        {
            "D": DELTA,
            "A": GATED,
            "E": {**GATED_EXPERTS, "shared_gate": True, "normalise": False},
            "-": MLP,
        },
        False,
    ),
    "qwen3_5-yarn": (
        "D-A-",
        {"D": DELTA, "A": {**GATED, "rope": {"scale": "yarn", "factor": 4.0, "original": 8}}, "-": MLP},
        False,
    ),
}
SQUARED = {"kind": "squared_relu", "hidden": 56}
EXPERTS = {
    "kind": "moe",
    "experts": 8,
    "top_k": 3,
    "hidden": 24,
    "activation": "squared_relu",
    "shared": 40,
    "scores": "sigmoid",
    "scale": 2.5,
    "balance": "bias",
}
MODELS |= {
    "nemotron_h": (
        "M-A-MM",
        {"M": {**MAMBA2, "heads": 6}, "A": {**ATTENTION, "head_dim": 12, "rope": "none"}, "-": SQUARED},
        False,
    ),
    "nemotron_h-in_any_order": ("-AM-A", {"M": MAMBA2, "A": {**ATTENTION, "rope": "none"}, "-": SQUARED}, False),
    "nemotron_h-experts": ("MEAEM", {"M": MAMBA2, "A": {**ATTENTION, "rope": "none"}, "E": EXPERTS}, False),
    "nemotron_h-groups": (
        "M-AE",
        {
            "M": MAMBA2,
            "A": {**ATTENTION, "rope": "none"},
            "-": SQUARED,
            "E": {**EXPERTS, "normalise": False, "groups": 4, "group_limit": 2, "latent": 12},
        },
        False,
    ),
}
SHARED = {"kind": "shared_attention", "heads": 4, "hidden": 40, "rank": 3}
ADAPTED = {**SHARED, "adapt_attention": True, "rope": "none"}
MODELS |= {
    "zamba2": ("MAMMBMAM", {"M": MAMBA2, "A": ADAPTED, "B": ADAPTED}, True),
    "zamba2-floor": ("AMMAM", {"M": {**MAMBA2, "dt_floor": 0.01}, "A": {**SHARED, "rope": {"base": 50000.0}}}, True),
}
BY = {"z": 0.5, "x": 0.25, "B": 0.75, "C": 1.5, "dt": 2.0}
PARALLEL: dict[str, dict[str, Any]] = {
    "M": {**MAMBA2, "heads": 6, "norm": False, "multipliers": BY, "output_multiplier": 0.3},
    "A": {**ATTENTION, "head_dim": 16, "beside": True, "scale": 0.1, "output_multiplier": 0.9},
    "-": {**MLP, "gate_multiplier": 0.8, "output_multiplier": 0.6},
}
MODELS |= {
    "falcon_h1": ("(MA-)*2", PARALLEL, False),
    "falcon_h1-normed": ("MA-", {"M": MAMBA2, "A": {**ATTENTION, "beside": True}, "-": MLP}, True),
}
MAMBA = {"kind": "mamba", "state": 4, "conv": 3}
NORMED_MAMBA = {**MAMBA, "inner_norm": "learned"}
OPEN = {**ATTENTION, "rope": "none"}
PICKED = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 56, "normalise": False}
MODELS |= {
    "falcon_mamba": ("M*2", {"M": {**MAMBA, "inner_norm": "plain", "norm_eps": 1e-6}}, True),
    "jamba": ("M-AEM-ME", {"M": NORMED_MAMBA, "A": OPEN, "-": MLP, "E": PICKED}, False),
    "jamba-dense": ("M-A-M-", {"M": {**NORMED_MAMBA, "dt_rank": 3}, "A": OPEN, "-": MLP}, True),
    "jamba-experts": ("AEME", {"M": NORMED_MAMBA, "A": OPEN, "E": PICKED}, False),
}
WINDOW = {**ATTENTION, "window": 9}
SPAN = {"kind": "span", "heads": 4, "kv_heads": 2, "chunk": 16, "block": 4, "blocks": 2}
CUSTOM: dict[str, tuple[str, dict[str, dict[str, Any]], bool]] = {
    "samba": ("(M-W-)*2", {"M": MAMBA, "W": WINDOW, "-": MLP}, True),
    "mamba-swa-mlp": ("(MW-)*2", {"M": MAMBA, "W": {**WINDOW, "kv_heads": 1}, "-": MLP}, False),
    "mamba-mlp": ("(M-)*2", {"M": MAMBA, "-": MLP}, True),
    "mamba2-window": ("(MW)*2", {"M": MAMBA2, "W": {**WINDOW, "head_dim": 12}}, False),
    "scaled": (
        "A-W-S",
        {
            "A": {**ATTENTION, "rope": {"scale": "yarn", "factor": 4.0, "original": 8}},
            "W": {**WINDOW, "rope": {"scale": "linear", "factor": 2.0}},
            "S": {**SPAN, "rope": {"scale": "llama3", "factor": 4.0, "original": 20}},
            "-": MLP,
        },
        True,
    ),
    "conv": (
        "A-C-",
        {
            "A": {**ATTENTION, "conv": 4, "conv_bias": True, "conv_silu": False, "rotary_dim": 4, "scale": 0.2},
            "C": {**WINDOW, "conv": 3, "rope": "none"},
            "-": MLP,
        },
        True,
    ),
    "everything": (
        "MN-WCS-",
        {
            "M": MAMBA,
            "N": MAMBA2,
            "W": WINDOW,
            "C": {**ATTENTION, "conv": 4, "conv_bias": True, "conv_silu": False, "rotary_dim": 4},
            "S": SPAN,
            "-": MLP,
        },
        True,
    ),
    "span": ("MS-", {"M": MAMBA2, "S": {**SPAN, "conv": 3}, "-": MLP}, False),
    "span-chosen": (
        "MS-",
        {"M": MAMBA2, "S": {**SPAN, "relevance": "previous_chunk", "eval": "span"}, "-": MLP},
        False,
    ),
    "span-landmark": (
        "S-",
        {"S": {**SPAN, "relevance": "previous_chunk", "memory": "landmark", "eval": "span"}, "-": MLP},
        False,
    ),
    "shared-window": (
        "MSMSMTM",
        {"M": MAMBA2, "S": {**ADAPTED, "window": 9}, "T": {**SHARED, "kv_heads": 2}},
        False,
    ),
    "three-beside": (
        "MWAP-",
        {
            **PARALLEL,
            "W": {**WINDOW, "beside": True},
            "P": {**MLP, "beside": True, "output_multiplier": 0.5},
        },
        True,
    ),
    "shared-span": ("(MS)*2M", {"M": MAMBA2, "S": {**SPAN, **SHARED, "kind": "shared_span"}}, True),
    "span-random": ("S-", {"S": {**SPAN, "memory": "random", "eval": "span"}, "-": MLP}, False),
    "span-shifted": ("S-", {"S": {**SPAN, "memory": "shifted", "eval": "span"}, "-": MLP}, False),
}
SHIPPED = yaml.safe_load((Path(__file__).parents[2] / "configs/recipe/samba_span_laptop.yaml").read_text())["model"]
CUSTOM["samba-span"] = (SHIPPED["pattern"], SHIPPED["layers"], True)
CLASSES = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "granite": "GraniteMoeHybridForCausalLM",
    "dense_granite": "GraniteForCausalLM",
    "bamba": "BambaForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "jamba": "JambaForCausalLM",
}


MULTIPLIED = {"granite-scaled", "dense_granite", "conv"}


def model_config(name: str) -> ModelConfig:
    pattern, layers, tied = (MODELS | CUSTOM)[name]
    model = ModelConfig(width=WIDTH, vocab_size=VOCAB, pattern=pattern, layers=layers, tie_embeddings=tied)
    if name in MULTIPLIED:
        return replace(model, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0)
    return model


@torch.no_grad()
def _add_noise(engine: Engine) -> None:
    for stage in engine.stages:
        for number, weight in enumerate(stage.model.parameters()):
            added = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight += 0.2 * added.to(weight.dtype)


def checkpoint_of(
    model: ModelConfig,
    groups: Groups,
    run: Path,
    precision: str = "fp32",
    parallel: ParallelConfig | None = None,
    weights: Checkpoint | None = None,
) -> Checkpoint:
    """Write a checkpoint of a model, and return it.

    All weights differ from their initial values, also norms, D, A_log and biases; with `weights` they are that
    checkpoint's.
    """
    config = small_run(model, precision=precision)
    config.parallel = parallel or config.parallel
    if weights is None:
        engine = Engine(resolve(config)[0], groups)
        _add_noise(engine)
    else:
        engine = Engine(resolve(config)[0], groups, weights.weights(architecture(model).table))
    run.mkdir(parents=True, exist_ok=True)
    tokenizer = run / f"tokenizer-{groups.rank}.json"
    vocabulary = {f"w{number}": number for number in range(VOCAB - 1)}
    tokenizer.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
            }
        )
    )
    Saver(RunPlan.of(engine.config), run, groups).save(engine, meta_of(engine, 1, {"eos": "3"}), tokenizer)
    return Checkpoint.open(folder_of(run, 1))


def own_model(checkpoint: Checkpoint, dtype: torch.dtype) -> LanguageModel:
    """Return a checkpoint's model with weights of this dtype, which otherwise computes in fp32."""
    return in_fp32(whole_model(checkpoint), dtype)
