"""Our models compared with these classes in transformers at equal weights: logits and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel

WIDTH = 64
VOCAB = 97
HIDDEN = 112
LENGTH = 40
Names = dict[str, list[str | tuple[str, slice]]]
"""Our weight -> transformers' weights, or some rows of them, which one below the other it is."""


def llama_names(model: LanguageModel) -> Names:
    names = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    names["head.weight"] = ["lm_head.weight"]
    for block in range(len(model.layers) // 2):
        theirs = f"model.layers.{block}"
        attention = f"layers.{2 * block}"
        mlp = f"layers.{2 * block + 1}"
        names |= {
            f"{attention}.norm.weight": [f"{theirs}.input_layernorm.weight"],
            f"{attention}.mixer.q.weight": [f"{theirs}.self_attn.q_proj.weight"],
            f"{attention}.mixer.kv.weight": [f"{theirs}.self_attn.{part}_proj.weight" for part in "kv"],
            f"{attention}.mixer.out.weight": [f"{theirs}.self_attn.o_proj.weight"],
            f"{mlp}.norm.weight": [f"{theirs}.post_attention_layernorm.weight"],
            f"{mlp}.mixer.gate_up.weight": [f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up")],
            f"{mlp}.mixer.down.weight": [f"{theirs}.mlp.down_proj.weight"],
        }
    return names


def mamba_names(model: LanguageModel) -> Names:
    names = {"embedding.weight": ["backbone.embeddings.weight"], "norm.weight": ["backbone.norm_f.weight"]}
    ours_to_theirs = {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_proj.bias"}
    for name, _ in model.layers.named_parameters():
        layer, _, rest = name.partition(".")
        rest = rest.replace("mixer.", "")
        theirs = rest
        if rest != "norm.weight":
            theirs = f"mixer.{ours_to_theirs.get(rest, rest)}"
        names[f"layers.{name}"] = [f"backbone.layers.{layer}.{theirs}"]
    return names


def mamba_pair() -> tuple[LanguageModel, torch.nn.Module, Names]:
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, num_hidden_layers=3, time_step_rank=4,
        residual_in_fp32=False, use_cache=False,
    )  # fmt: skip
    layers = {"M": {"kind": "mamba", "state": 8}}
    ours = LanguageModel(architecture(ModelConfig(width=WIDTH, vocab_size=VOCAB, pattern="M*3", layers=layers)))
    return ours, MambaForCausalLM(config), mamba_names(ours)


def mamba2_names(model: LanguageModel, inner: int, both: int) -> Names:
    """`inner` channels, and `both` for each of B and C: in_proj is z, x, B, C, dt there, and conv1d is x, B, C."""
    names: Names = {"embedding.weight": ["backbone.embeddings.weight"], "norm.weight": ["backbone.norm_f.weight"]}
    z_x = slice(2 * inner)
    b_c = slice(2 * inner, 2 * inner + 2 * both)
    dt = slice(2 * inner + 2 * both, None)
    for layer in model.layers:
        theirs = f"backbone.layers.{layer}"
        ours = f"layers.{layer}"
        in_proj = f"{theirs}.mixer.in_proj.weight"
        names[f"{ours}.norm.weight"] = [f"{theirs}.norm.weight"]
        names[f"{ours}.mixer.in_proj.weight"] = [(in_proj, z_x), (in_proj, dt)]
        names[f"{ours}.mixer.bc_proj.weight"] = [(in_proj, b_c)]
        for kind in ("weight", "bias"):
            convolution = f"{theirs}.mixer.conv1d.{kind}"
            names[f"{ours}.mixer.x_conv_{kind}"] = [(convolution, slice(inner))]
            names[f"{ours}.mixer.bc_conv_{kind}"] = [(convolution, slice(inner, None))]
        names[f"{ours}.mixer.norm_weight"] = [f"{theirs}.mixer.norm.weight"]
        for same in ("A_log", "D", "dt_bias", "out_proj.weight"):
            names[f"{ours}.mixer.{same}"] = [f"{theirs}.mixer.{same}"]
    return names


def mamba2_pair(groups: int = 1) -> tuple[LanguageModel, torch.nn.Module, Names]:
    """Chunks of 16 tokens there, so that 40 are two and a half; the gated norm goes by groups from 5.23 on."""
    config = Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, num_hidden_layers=3, num_heads=8, head_dim=16,
        n_groups=groups, chunk_size=16, residual_in_fp32=False, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = Mamba2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "norm" in name or name.endswith((".D", "conv1d.bias")):  # they start as constants
                weight += 0.3 * torch.randn_like(weight)
    layers = {"M": {"kind": "mamba2", "state": 8, "head_dim": 16, "groups": groups}}
    ours = LanguageModel(architecture(ModelConfig(width=WIDTH, vocab_size=VOCAB, pattern="M*3", layers=layers)))
    return ours, theirs, mamba2_names(ours, 2 * WIDTH, 8 * groups)


def mamba2_groups_pair() -> tuple[LanguageModel, torch.nn.Module, Names]:
    return mamba2_pair(groups=2)


def llama_pair() -> tuple[LanguageModel, torch.nn.Module, Names]:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    layers = {"F": {"kind": "attention", "heads": 4, "kv_heads": 2}, "-": {"kind": "swiglu", "hidden": HIDDEN}}
    return transformer_pair(LlamaForCausalLM(config), "(F-)*2", layers)


def mistral_pair() -> tuple[LanguageModel, torch.nn.Module, Names]:
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, rms_norm_eps=1e-5, sliding_window=9, tie_word_embeddings=False,
    )  # fmt: skip
    attention = {"kind": "attention", "heads": 4, "kv_heads": 1, "window": 9}
    return transformer_pair(
        MistralForCausalLM(config), "(W-)*2", {"W": attention, "-": {"kind": "swiglu", "hidden": HIDDEN}}
    )


def granite_pair() -> tuple[LanguageModel, torch.nn.Module, Names]:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False, attention_multiplier=0.1, **multipliers,
    )  # fmt: skip
    attention = {"kind": "attention", "heads": 4, "kv_heads": 2, "scale": 0.1}
    layers = {"F": attention, "-": {"kind": "swiglu", "hidden": HIDDEN}}
    return transformer_pair(GraniteForCausalLM(config), "(F-)*2", layers, multipliers)


def transformer_pair(
    theirs: torch.nn.Module, pattern: str, layers: dict, multipliers: dict[str, float] | None = None
) -> tuple[LanguageModel, torch.nn.Module, Names]:
    model = ModelConfig(width=WIDTH, vocab_size=VOCAB, pattern=pattern, layers=layers, tie_embeddings=False)
    ours = LanguageModel(architecture(replace(model, **(multipliers or {}))))
    return ours, theirs, llama_names(ours)


def joined(theirs: dict[str, Tensor], names: list[str | tuple[str, slice]], like: Tensor) -> Tensor:
    parts = []
    for name in names:
        if isinstance(name, str):
            parts.append(theirs[name])
        else:
            weight, rows = name
            parts.append(theirs[weight][rows])
    return torch.cat(parts).reshape(like.shape)


@pytest.mark.parametrize("pair", [mamba_pair, mamba2_pair, mamba2_groups_pair, llama_pair, mistral_pair, granite_pair])
def test_equal_weights_give_the_logits_and_gradients_of_transformers(pair) -> None:
    ours, theirs, names = pair()
    ours = ours.double()
    theirs = theirs.double()
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(joined(weights, names[name], weight))
    tokens = torch.randint(VOCAB, (2, LENGTH))
    targets = torch.randint(VOCAB, (2, LENGTH))

    logits = ours(tokens, None, SeqInfo.stream(2, LENGTH)).output.transpose(0, 1)
    expected = theirs(tokens).logits
    # transformers computes its norms and the scan's states in fp32 even here, so fp32's rounding is the limit
    torch.testing.assert_close(logits, expected.to(logits.dtype), rtol=1e-4, atol=1e-5)

    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
    their_gradients = {name: weight.grad for name, weight in weights.items()}
    for name, weight in ours.named_parameters():
        expected_gradient = joined(their_gradients, names[name], weight)
        assert (weight.grad - expected_gradient).norm() <= 1e-4 * expected_gradient.norm(), name
