"""Classes of transformers whose layers are a mixer and a gated MLP: Llama, Mistral, Granite's hybrid, no experts."""

from __future__ import annotations

from typing import Any

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.exportable import halves
from hybridtron.interop.native import Native, Settings, checked, token_rules
from hybridtron.interop.rules import Rules, TensorRule

FUSED_MLP: Names = {
    "input_linear.weight": ("gate_up.weight.gate", "gate_up.weight.up"),
    "output_linear.weight": ("down.weight",),
}


def _attention_of(model: ModelConfig, spec: AttentionSpec, arch: Architecture) -> Settings:
    return {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.groups(),
        "head_dim": spec.head(arch.sizes),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": model.norm_eps,
    }


def _rope_of(theirs: Settings) -> float:
    found = theirs.get("rope_parameters") or {}
    if found.get("rope_type", "default") != "default" or theirs.get("rope_scaling"):
        raise ValueError(f"scales its rotary positions ({found or theirs['rope_scaling']}); we do not")
    return float(found.get("rope_theta", theirs.get("rope_theta", 10000.0)))


def _heads_of(theirs: Settings) -> Settings:
    checked(theirs, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"})
    heads = theirs["num_attention_heads"]
    return {
        "kind": "attention",
        "heads": heads,
        "kv_heads": theirs.get("num_key_value_heads") or heads,
        "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
    }


class Llama(Native):
    """Full attention and gated MLPs in turn."""

    name, model_type = "LlamaForCausalLM", "llama"
    windowed, together = False, 2

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        spec, mlp = arch.specs[:2]
        assert isinstance(spec, AttentionSpec)
        assert isinstance(mlp, SwiGLUSpec)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_base}
        window = {"sliding_window": spec.window} if self.windowed else {"mlp_bias": False}
        return {
            **_attention_of(model, spec, arch),
            "num_hidden_layers": len(arch.specs) // 2,
            "intermediate_size": mlp.hidden,
            "hidden_act": "silu",
            "max_position_embeddings": length,
            "rope_parameters": rope,
            "rope_theta": spec.rope_base,
            **window,
        }

    def rules(self, model: ModelConfig) -> list[TensorRule]:
        rules = Rules(model)
        token_rules(rules, model, "model.embed_tokens.weight", "model.norm.weight")
        for layer in range(len(architecture(model).specs) // 2):
            theirs = f"model.layers.{layer}"
            rules.add(f"{theirs}.input_layernorm.weight", f"layers.{2 * layer}.norm.weight")
            rules.add_mixer(f"{theirs}.self_attn", 2 * layer)
            rules.add(f"{theirs}.post_attention_layernorm.weight", f"layers.{2 * layer + 1}.norm.weight")
            rules.add_mixer(f"{theirs}.mlp", 2 * layer + 1)
        return rules.complete()

    def model(self, theirs: Settings) -> ModelConfig:
        attention = {**_heads_of(theirs), "rope_base": _rope_of(theirs)}
        if self.windowed:
            attention["window"] = theirs["sliding_window"]
        return ModelConfig(
            width=theirs["hidden_size"],
            vocab_size=theirs["vocab_size"],
            pattern=f"(A-)*{theirs['num_hidden_layers']}",
            layers={"A": attention, "-": {"kind": "swiglu", "hidden": theirs["intermediate_size"]}},
            tie_embeddings=theirs.get("tie_word_embeddings", False),
            norm_eps=theirs["rms_norm_eps"],
        )


class Mistral(Llama):
    """The same with a window in every layer."""

    name, model_type = "MistralForCausalLM", "mistral"
    windowed = True


class Granite(Native):
    """Mamba-2 or full attention, each followed by a gated MLP."""

    name, model_type = "GraniteMoeHybridForCausalLM", "granitemoehybrid"
    together = 2

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        mixers, mlps = halves(arch)
        mamba = next(spec for spec in mixers if isinstance(spec, Mamba2Spec))
        attention = next((spec for spec in mixers if isinstance(spec, AttentionSpec)), AttentionSpec(heads=1))
        assert isinstance(mlps[0], SwiGLUSpec)
        head = attention.head(arch.sizes)
        return {
            **_attention_of(model, attention, arch),
            "num_hidden_layers": len(mixers),
            "layer_types": ["mamba" if isinstance(spec, Mamba2Spec) else "attention" for spec in mixers],
            "shared_intermediate_size": mlps[0].hidden,
            "intermediate_size": mlps[0].hidden,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "hidden_act": "silu",
            "max_position_embeddings": length,
            "position_embedding_type": "rope" if attention.rope_base is not None else None,
            "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_base or 10000.0},
            "rope_theta": attention.rope_base or 10000.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": head**-0.5,
            "mamba_n_heads": mamba.num_heads(arch.sizes),
            "mamba_d_head": mamba.head_dim,
            "mamba_n_groups": mamba.groups,
            "mamba_d_state": mamba.state,
            "mamba_d_conv": mamba.conv,
            "mamba_expand": mamba.expand,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        }

    def rules(self, model: ModelConfig) -> list[TensorRule]:
        rules, arch = Rules(model), architecture(model)
        token_rules(rules, model, "model.embed_tokens.weight", "model.norm.weight")
        for layer, spec in enumerate(halves(arch)[0]):
            theirs = f"model.layers.{layer}"
            mixer = "mamba" if isinstance(spec, Mamba2Spec) else "self_attn"
            rules.add(f"{theirs}.input_layernorm.weight", f"layers.{2 * layer}.norm.weight")
            rules.add_mixer(f"{theirs}.{mixer}", 2 * layer)
            rules.add(f"{theirs}.post_attention_layernorm.weight", f"layers.{2 * layer + 1}.norm.weight")
            rules.add_mixer(f"{theirs}.shared_mlp", 2 * layer + 1, FUSED_MLP)
        return rules.complete()

    def model(self, theirs: Settings) -> ModelConfig:
        ones = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
        checked(theirs, {**ones, "num_local_experts": 0, "mamba_conv_bias": True, "mamba_proj_bias": False})
        attention = _heads_of(theirs)
        if abs(theirs["attention_multiplier"] - attention["head_dim"] ** -0.5) > 1e-9:
            raise ValueError("has an attention_multiplier other than head_dim^-0.5")
        rotary = theirs.get("position_embedding_type") == "rope"
        attention["rope_base"] = _rope_of(theirs) if rotary else None
        mamba = {
            "kind": "mamba2",
            "state": theirs["mamba_d_state"],
            "expand": theirs["mamba_expand"],
            "head_dim": theirs["mamba_d_head"],
            "groups": theirs["mamba_n_groups"],
            "conv": theirs["mamba_d_conv"],
            "norm_eps": theirs["rms_norm_eps"],
        }
        of_type = {"mamba": "M-", "linear_attention": "M-", "attention": "A-", "full_attention": "A-"}
        if unknown := sorted(set(theirs["layer_types"]) - set(of_type)):
            raise ValueError(f"has layer_types with {unknown[0]!r}; only {', '.join(of_type)} can be taken over")
        letters = "".join(of_type[name] for name in theirs["layer_types"])
        layers = {"M": mamba, "A": attention, "-": {"kind": "swiglu", "hidden": theirs["shared_intermediate_size"]}}
        return ModelConfig(
            width=theirs["hidden_size"],
            vocab_size=theirs["vocab_size"],
            pattern=letters,
            layers={letter: layers[letter] for letter in layers if letter in letters},
            tie_embeddings=theirs.get("tie_word_embeddings", False),
            norm_eps=theirs["rms_norm_eps"],
        )
