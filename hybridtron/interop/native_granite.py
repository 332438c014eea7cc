"""Granite without experts, and Granite's Mamba-2 hybrid with or without experts.

Both multiply embeddings, sub-layer outputs, attention scores and logits by factors in config.json.

A layer of the hybrid has an MLP that computes every token. With experts, this MLP is our shared expert. The router
takes the softmax of the largest logits alone, which equals our softmax of all logits with `normalise`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import NO_POSITIONS
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import halves
from hybridtron.interop.native import (
    Settings,
    SubLayerNames,
    multipliers_of,
    require_known,
    to_ours,
    to_theirs,
    with_multipliers,
)
from hybridtron.interop.native_pairs import BEFORE, BETWEEN, FUSED_MLP, Llama, Mamba2Hybrid, attention_of, experts_of
from hybridtron.interop.rules import TensorRule

SCALE = "attention_multiplier"
EXPERTS: Names = {
    "block_sparse_moe.router.layer.weight": ("router",),
    "block_sparse_moe.input_linear.weight": ("gate_up.gate", "gate_up.up"),
    "block_sparse_moe.output_linear.weight": ("down",),
    "shared_mlp.input_linear.weight": ("shared_gate_up.weight.gate", "shared_gate_up.weight.up"),
    "shared_mlp.output_linear.weight": ("shared_down.weight",),
}
MEMORY = {  # end of a name in files -> end of the parameter's name in transformers
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}


class Granite(Llama):
    """Granite: Llama's layers with multipliers."""

    name = "GraniteForCausalLM"
    model_type = "granite"

    def settings(self, arch: Architecture, length: int) -> Settings:
        attention = attention_of(arch)
        if attention.scale is None:
            scale = attention.head(arch.sizes) ** -0.5
        else:
            scale = attention.scale
        return super().settings(arch, length) | multipliers_of(arch) | {SCALE: scale}

    def model(self, theirs: Settings) -> ModelConfig:
        return with_multipliers(super().model(theirs), theirs)

    def attention(self, theirs: Settings) -> Settings:
        options = super().attention(theirs)
        is_default = abs(theirs[SCALE] - options["head_dim"] ** -0.5) <= 1e-9
        if is_default:
            return options
        return {**options, "scale": theirs[SCALE]}


class GraniteHybrid(Granite, Mamba2Hybrid):
    """Granite's hybrid: layers of Mamba-2 or full attention, each followed by a gated MLP or experts.

    Files have the experts of a layer in two tensors, whose first dimension counts the experts.

    Attention has RoPE if `position_embedding_type` is `rope` in config.json, else no positions.
    """

    name = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    sub_layers: ClassVar = {
        "mamba2": SubLayerNames(BEFORE, "mamba"),
        "attention": SubLayerNames(BEFORE, "self_attn"),
        "swiglu": SubLayerNames(BETWEEN, "shared_mlp", FUSED_MLP),
        "moe": SubLayerNames(BETWEEN, "", EXPERTS),
    }
    fixed: ClassVar = Mamba2Hybrid.fixed
    hidden = "shared_intermediate_size"
    experts: ClassVar = {"num_local_experts": "experts", "num_experts_per_tok": "top_k", "intermediate_size": "hidden"}

    def rules(self, arch: Architecture) -> list[TensorRule]:
        return [replace(rule, memory=_in_memory(rule.theirs)) for rule in super().rules(arch)]

    def settings(self, arch: Architecture, length: int) -> Settings:
        common = super().settings(arch, length)
        mixers = halves(arch)[0]
        return {
            **common,
            "layer_types": ["mamba" if isinstance(spec, Mamba2Spec) else "attention" for spec in mixers],
            "position_embedding_type": "rope" if attention_of(arch).positions is not None else None,
        }

    def mlp_settings(self, arch: Architecture) -> Settings:
        experts = experts_of(arch)
        if experts is None:
            dense = super().mlp_settings(arch)
            return {**dense, "intermediate_size": dense[self.hidden], "num_local_experts": 0, "num_experts_per_tok": 0}
        return {self.hidden: experts.shared, **to_theirs(self.experts, experts.exported_options(arch.sizes))}

    def mlp(self, theirs: Settings) -> Settings:
        if theirs["num_local_experts"] == 0:
            return super().mlp(theirs)
        return {"kind": "moe", "shared": theirs[self.hidden], **to_ours(self.experts, theirs)}

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        letters_of_type = {"mamba": "M-", "linear_attention": "M-", "attention": "A-", "full_attention": "A-"}
        require_known(theirs, "layer_types", letters_of_type)
        return self.with_letters("".join(letters_of_type[name] for name in theirs["layer_types"]), theirs)

    def attention(self, theirs: Settings) -> Settings:
        options = super().attention(theirs)
        if theirs.get("position_embedding_type") == "rope":
            return options
        return {**options, "rope": NO_POSITIONS}


def _in_memory(name: str) -> str:
    """Return the name in transformers of a parameter that is named `name` in files, or "" if both are equal."""
    ends = [end for end in MEMORY if name.endswith(end)]
    if not ends:
        return ""
    return name.removesuffix(ends[0]) + MEMORY[ends[0]]
