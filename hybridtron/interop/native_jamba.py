"""Jamba and Falcon-Mamba: Mamba-1 with norms of dt, B and C.

Jamba's layers have Mamba-1 or full attention without positions, then a gated MLP or experts. Two periods and two
offsets in config.json say which layers have attention, and which have experts: layer i has attention if
i % attn_layer_period == attn_layer_offset. With num_experts=1 all MLPs are dense. MLPs and experts have equal sizes.

Falcon-Mamba's layers are all Mamba-1. Its norms of dt, B and C have no weights.
"""

from __future__ import annotations

from typing import ClassVar

from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.rope import NO_POSITIONS
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import halves, period_of
from hybridtron.interop.native import (
    Native,
    NativeMamba,
    Settings,
    SubLayerNames,
    require_few_experts,
    to_ours,
    to_theirs,
)
from hybridtron.interop.native_pairs import BEFORE, attention_of, attention_options

BETWEEN = "pre_ff_layernorm"  # the norm before the MLP
FALCON_EPS = 1e-6  # epsilon of Falcon-Mamba's norms of dt, B and C, if config.json has none
EXPERTS: Names = {
    "router.weight": ("router",),
    "experts.*.gate_proj.weight": ("gate_up.gate",),
    "experts.*.up_proj.weight": ("gate_up.up",),
    "experts.*.down_proj.weight": ("down",),
}


class FalconMamba(NativeMamba):
    """Falcon-Mamba: layers of Mamba-1, in which the norms of dt, B and C have no weights."""

    name = "FalconMambaForCausalLM"
    model_type = "falcon_mamba"

    def derived(self, spec: MambaSpec, arch: Architecture) -> Settings:  # type: ignore[override]
        return super().derived(spec, arch) | {"mixer_rms_eps": spec.norm_eps}

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        pattern, layers = super().pattern(theirs)
        layers["M"] |= {"inner_norm": "plain", "norm_eps": theirs.get("mixer_rms_eps", FALCON_EPS)}
        return pattern, layers


class Jamba(Native):
    """Jamba, with experts or without."""

    name = "JambaForCausalLM"
    model_type = "jamba"
    final_norm = "model.final_layernorm.weight"
    by_place = True
    sub_layers: ClassVar = {
        "mamba": SubLayerNames(BEFORE, "mamba"),
        "attention": SubLayerNames(BEFORE, "self_attn"),
        "swiglu": SubLayerNames(BETWEEN, "feed_forward"),
        "moe": SubLayerNames(BETWEEN, "feed_forward", EXPERTS),
    }
    fixed: ClassVar = {"mamba_conv_bias": True, "mamba_proj_bias": False, "hidden_act": "silu"}
    mamba: ClassVar = {
        "mamba_d_state": "state",
        "mamba_expand": "expand",
        "mamba_d_conv": "conv",
        "mamba_dt_rank": "dt_rank",
    }

    def groups(self, arch: Architecture) -> list[range]:
        return [range(first, first + 2) for first in range(0, len(arch.specs), 2)]

    def settings(self, arch: Architecture, length: int) -> Settings:
        mixers, mlps = halves(arch)
        mamba = next(spec for spec in mixers if isinstance(spec, MambaSpec))
        attention = attention_of(arch)
        experts = next((spec for spec in mlps if isinstance(spec, MoESpec)), None)
        hidden = next(spec.hidden for spec in mlps if isinstance(spec, SwiGLUSpec | MoESpec))
        attention_period = period_of([spec.kind == "attention" for spec in mixers])
        expert_period = period_of([spec.kind == "moe" for spec in mlps])
        assert attention_period is not None
        assert expert_period is not None
        return {
            **to_theirs(self.mamba, mamba.exported_options(arch.sizes)),
            "num_hidden_layers": len(mixers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.groups(),
            "attention_dropout": 0.0,
            "intermediate_size": hidden,
            "attn_layer_period": attention_period.period,
            "attn_layer_offset": attention_period.offset,
            "expert_layer_period": expert_period.period,
            "expert_layer_offset": expert_period.offset,
            "num_experts": experts.experts if experts else 1,
            "num_experts_per_tok": experts.top_k if experts else 1,
            "output_router_logits": False,
            "max_position_embeddings": length,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        count = theirs["num_hidden_layers"]
        experts = theirs["num_experts"]
        require_few_experts(experts, count)
        layers = {
            "M": self.mamba_options(theirs),
            "A": self.attention(theirs),
            "-": {"kind": "swiglu", "hidden": theirs["intermediate_size"]},
            "E": {
                "kind": "moe",
                "experts": experts,
                "top_k": theirs["num_experts_per_tok"],
                "hidden": theirs["intermediate_size"],
                "normalise": False,
            },
        }
        pattern = ""
        for index in range(count):
            has_attention = index % theirs["attn_layer_period"] == theirs["attn_layer_offset"]
            has_experts = experts > 1 and index % theirs["expert_layer_period"] == theirs["expert_layer_offset"]
            pattern += ("A" if has_attention else "M") + ("E" if has_experts else "-")
        if "A" not in pattern:
            raise ValueError("has no layer with attention; transformers can't generate with such a model")
        return pattern, {letter: options for letter, options in layers.items() if letter in pattern}

    def mamba_options(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our Mamba-1."""
        options = {
            "kind": "mamba",
            **to_ours(self.mamba, theirs),
            "inner_norm": "learned",
            "norm_eps": theirs[self.norm_eps],
        }
        if options["dt_rank"] == "auto":
            options["dt_rank"] = None
        return options

    def attention(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our attention."""
        return attention_options(theirs, theirs["hidden_size"] // theirs["num_attention_heads"], NO_POSITIONS)
