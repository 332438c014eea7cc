"""Classes of transformers with layers of attention or Mamba-2, and a gated MLP: Llama, Mistral, a base for hybrids."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.rope import RopeOptions
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture
from hybridtron.interop import rope_parameters
from hybridtron.interop.native import Native, Settings, SubLayerNames, to_ours, to_theirs

BEFORE = "input_layernorm"  # the norm before attention or Mamba-2
BETWEEN = "post_attention_layernorm"  # the norm before the MLP
# values of time_step_limit that do not limit step sizes; transformers writes infinity to JSON as an object
NO_LIMIT: tuple[Any, ...] = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None)
FUSED_MLP: Names = {
    "input_linear.weight": ("gate_up.weight.gate", "gate_up.weight.up"),
    "output_linear.weight": ("down.weight",),
}


class Llama(Native):
    """Llama: layers of full attention and a gated MLP."""

    name = "LlamaForCausalLM"
    model_type = "llama"
    in_pairs = True
    sub_layers: ClassVar = {
        "attention": SubLayerNames(BEFORE, "self_attn"),
        "swiglu": SubLayerNames(BETWEEN, "mlp"),
    }
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    hidden: ClassVar[str] = "intermediate_size"

    def settings(self, arch: Architecture, length: int) -> Settings:
        spec = attention_of(arch)
        rope = self.positions(spec)
        return {
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.groups(),
            "head_dim": spec.head(arch.sizes),
            "attention_dropout": 0.0,
            "num_hidden_layers": len(self.groups(arch)),
            **self.mlp_settings(arch),
            "max_position_embeddings": length,
            rope_parameters.PARAMETERS: rope,
            "rope_theta": rope["rope_theta"],
        }

    def mlp_settings(self, arch: Architecture) -> Settings:
        """Return the entries in config.json for the layers' MLPs."""
        mlp = next(spec for spec in arch.specs if isinstance(spec, SwiGLUSpec))
        return {self.hidden: mlp.hidden}

    def positions(self, spec: AttentionSpec) -> Settings:
        """Return the RoPE parameters for config.json, or the defaults for a model without positions.

        Classes that support models without positions (GraniteHybrid, OlmoHybrid) mark such a model by another entry.
        """
        return rope_parameters.to_theirs(spec.positions or RopeOptions())

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return f"(A-)*{theirs['num_hidden_layers']}", {"A": self.attention(theirs), "-": self.mlp(theirs)}

    def mlp(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our MLP."""
        return {"kind": "swiglu", "hidden": theirs[self.hidden]}

    def attention(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our attention."""
        head_dim = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
        return attention_options(theirs, head_dim, rope_parameters.to_ours(theirs))


class Mistral(Llama):
    """Mistral: Llama's layers with sliding-window attention."""

    name = "MistralForCausalLM"
    model_type = "mistral"

    def settings(self, arch: Architecture, length: int) -> Settings:
        return super().settings(arch, length) | {"sliding_window": attention_of(arch).window}

    def attention(self, theirs: Settings) -> Settings:
        return super().attention(theirs) | {"window": theirs["sliding_window"]}


class Mamba2Hybrid(Llama):
    """Base class for hybrids: each layer has Mamba-2 or full attention, followed by a gated MLP."""

    fixed: ClassVar = {**Llama.fixed, "mamba_conv_bias": True, "mamba_proj_bias": False}
    mamba: ClassVar = {
        "mamba_d_state": "state",
        "mamba_expand": "expand",
        "mamba_d_head": "head_dim",
        "mamba_n_groups": "groups",
        "mamba_d_conv": "conv",
    }

    def settings(self, arch: Architecture, length: int) -> Settings:
        mamba = next(spec for spec in arch.specs if isinstance(spec, Mamba2Spec))
        return {
            **super().settings(arch, length),
            **to_theirs(self.mamba, mamba.exported_options(arch.sizes)),
            "mamba_n_heads": mamba.num_heads(arch.sizes),
            "mamba_chunk_size": 256,
        }

    def with_letters(self, pattern: str, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        """Return the layer pattern, and the options for each letter in the pattern.

        Raises ValueError if no layer has attention, because transformers can't generate with such a model.
        """
        if "A" not in pattern:
            raise ValueError("has no layer with attention; transformers can't generate with such a model")
        layers = {"M": self.mamba_options(theirs), **super().pattern(theirs)[1]}
        return pattern, {letter: options for letter, options in layers.items() if letter in pattern}

    def mamba_options(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our Mamba-2.

        Raises ValueError if time_step_limit restricts step sizes, or if the number of heads times the head size is not
        the number of inner channels.
        """
        if (limit := theirs.get("time_step_limit", NO_LIMIT[0])) not in NO_LIMIT:
            raise ValueError(f"has time_step_limit={limit}; only {NO_LIMIT[0]} can be imported")
        inner = self.inner(theirs)
        heads = theirs["mamba_n_heads"]
        options = {"kind": "mamba2", **to_ours(self.mamba, theirs), "norm_eps": theirs[self.norm_eps]}
        if options["head_dim"] == "auto":
            options["head_dim"] = inner // heads
        if heads * options["head_dim"] != inner:
            raise ValueError(f"has mamba_n_heads x mamba_d_head different from the {inner} inner channels of Mamba-2")
        return options

    def inner(self, theirs: Settings) -> int:
        """Return how many inner channels Mamba-2 has, over all heads."""
        return theirs["mamba_expand"] * theirs["hidden_size"]


def experts_of(arch: Architecture) -> MoESpec | None:
    """Return the spec that all layers with experts share, or None if the model has no experts."""
    return next((spec for spec in arch.specs if isinstance(spec, MoESpec)), None)


def attention_options(theirs: Settings, head_dim: int, rope: Any) -> Settings:
    """Translate config.json's numbers of heads to options for our attention."""
    heads = theirs["num_attention_heads"]
    return {
        "kind": "attention",
        "heads": heads,
        "kv_heads": theirs.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope": rope,
    }


def attention_of(arch: Architecture) -> AttentionSpec:
    """Return the spec that all attention sub-layers share.

    If the model has no attention, return a spec with one head: config.json needs values even then.
    """
    return next((spec for spec in arch.specs if isinstance(spec, AttentionSpec)), AttentionSpec(heads=1))
