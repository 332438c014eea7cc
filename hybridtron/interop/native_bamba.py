"""Bamba: layers of Mamba-2 or full attention, each with a gated MLP. RoPE rotates half the channels in each head."""

from __future__ import annotations

from typing import ClassVar

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import halves
from hybridtron.interop import rope_parameters
from hybridtron.interop.native import Settings, SubLayerNames
from hybridtron.interop.native_pairs import BEFORE, Mamba2Hybrid

PART = "partial_rotary_factor"
TURNED = 0.5  # the only supported value of PART


class Bamba(Mamba2Hybrid):
    """Bamba. Its layers compute the same as GraniteHybrid's without multipliers; tensors have other names."""

    name = "BambaForCausalLM"
    model_type = "bamba"
    final_norm: ClassVar[str] = "model.final_layernorm.weight"
    sub_layers: ClassVar = {
        "mamba2": SubLayerNames(BEFORE, "mamba"),
        "attention": SubLayerNames(BEFORE, "self_attn"),
        "swiglu": SubLayerNames("pre_ff_layernorm", "feed_forward"),
    }

    def settings(self, arch: Architecture, length: int) -> Settings:
        mixers = halves(arch)[0]
        common = super().settings(arch, length)
        return {
            **common,
            rope_parameters.PARAMETERS: {**common[rope_parameters.PARAMETERS], PART: TURNED},
            PART: TURNED,
            "attn_layer_indices": [index for index, spec in enumerate(mixers) if isinstance(spec, AttentionSpec)],
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        attention_layers = theirs.get("attn_layer_indices") or []
        pattern = "".join("A-" if index in attention_layers else "M-" for index in range(theirs["num_hidden_layers"]))
        return self.with_letters(pattern, theirs)

    def attention(self, theirs: Settings) -> Settings:
        options = super().attention(theirs)
        rope = theirs.get(rope_parameters.PARAMETERS) or {}
        if (part := rope.get(PART, theirs.get(PART, TURNED))) != TURNED:
            raise ValueError(f"has {PART}={part}; only {TURNED} can be imported")
        return options | {"rotary_dim": int(options["head_dim"] * TURNED)}
