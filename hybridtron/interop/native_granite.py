"""Granite and Granite's Mamba-2 hybrid, both without experts.

Both multiply embeddings, sub-layer outputs, attention scores and logits by factors in config.json.
"""

from __future__ import annotations

from typing import ClassVar

from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import NO_POSITIONS
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import halves
from hybridtron.interop.native import Settings, SubLayerNames, multipliers_of, require_known, with_multipliers
from hybridtron.interop.native_pairs import BEFORE, BETWEEN, FUSED_MLP, Llama, Mamba2Hybrid, attention_of

SCALE = "attention_multiplier"


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
    """Granite's hybrid: layers of Mamba-2 or full attention, each followed by a gated MLP.

    Attention has RoPE if `position_embedding_type` is `rope` in config.json, else no positions.
    """

    name = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    sub_layers: ClassVar = {
        "mamba2": SubLayerNames(BEFORE, "mamba"),
        "attention": SubLayerNames(BEFORE, "self_attn"),
        "swiglu": SubLayerNames(BETWEEN, "shared_mlp", FUSED_MLP),
    }
    fixed: ClassVar = {**Mamba2Hybrid.fixed, "num_local_experts": 0}
    hidden = "shared_intermediate_size"

    def settings(self, arch: Architecture, length: int) -> Settings:
        common = super().settings(arch, length)
        mixers = halves(arch)[0]
        return {
            **common,
            "layer_types": ["mamba" if isinstance(spec, Mamba2Spec) else "attention" for spec in mixers],
            "intermediate_size": common[self.hidden],
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope" if attention_of(arch).positions is not None else None,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        letters_of_type = {"mamba": "M-", "linear_attention": "M-", "attention": "A-", "full_attention": "A-"}
        require_known(theirs, "layer_types", letters_of_type)
        return self.with_letters("".join(letters_of_type[name] for name in theirs["layer_types"]), theirs)

    def attention(self, theirs: Settings) -> Settings:
        options = super().attention(theirs)
        if theirs.get("position_embedding_type") == "rope":
            return options
        return {**options, "rope": NO_POSITIONS}
