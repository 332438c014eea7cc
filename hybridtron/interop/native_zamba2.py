"""Zamba2: layers of Mamba-2. In hybrid layers, a block of attention and MLP with shared weights comes before Mamba-2.

A model has one or several shared blocks, which its hybrid layers use in turn. Each hybrid layer has its own low-rank
adapters for the shared weights. A hybrid layer is two sub-layers here: the shared block, and the Mamba-2 that reads the
block's output.

Files store a shared block in the first layer that uses the block, together with the adapters for all layers that use
the block. An adapter's number is the index of its layer among the model's hybrid layers.
"""

from __future__ import annotations

from typing import ClassVar

from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.rope import NO_POSITIONS, RopeOptions
from hybridtron.architecture.shared_attention import SharedAttentionSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import ZAMBA2_MAMBA_EPS
from hybridtron.interop import rope_parameters
from hybridtron.interop.native import NO_FLOOR, Native, Settings, require_known, to_ours, to_theirs
from hybridtron.interop.rules import Rules

HYBRID = "hybrid"
MAMBA = "linear_attention"
OF_TYPE = {MAMBA: False, "mamba": False, HYBRID: True}  # layer type -> True if such layers have a shared block
LETTERS = "ABCDEFGHIJKL"  # pattern letters, one for each shared block
# tensors of a shared block: name in files -> our weights
BLOCK: Names = {
    "self_attn.q_proj.weight": ("q.weight",),
    "self_attn.k_proj.weight": ("kv.weight.k",),
    "self_attn.v_proj.weight": ("kv.weight.v",),
    "self_attn.o_proj.weight": ("out.weight",),
    "input_layernorm.weight": ("in_norm.weight",),
    "pre_ff_layernorm.weight": ("mlp_norm.weight",),
    "feed_forward.gate_up_proj.weight": ("gate_up.weight.gate", "gate_up.weight.up"),
    "feed_forward.down_proj.weight": ("down.weight",),
}
# adapters of a shared block: name of the adapted tensor in files -> our A and B; gate and up share A, but not B
PAIRS = {
    **{f"self_attn.linear_{part}": (f"{part}_A.weight", f"{part}_B.weight") for part in "qkv"},
    "feed_forward.gate_up_proj": ("gate_up_A.weight", "gate_up_B.weight.gate", "gate_up_B.weight.up"),
}


class Zamba2(Native):
    """Zamba2 without biases and without long-context RoPE scaling (`use_long_context`)."""

    name = "Zamba2ForCausalLM"
    model_type = "zamba2"
    final_norm = "model.final_layernorm.weight"
    tied = True
    fixed: ClassVar = {
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,  # if False, transformers does not share the blocks' weights among layers
        "use_conv_bias": True,
        "use_long_context": False,
    }
    mamba: ClassVar = {
        "mamba_d_state": "state",
        "mamba_expand": "expand",
        "mamba_ngroups": "groups",
        "mamba_d_conv": "conv",
    }
    block: ClassVar = {
        "num_attention_heads": "heads",
        "intermediate_size": "hidden",
        "adapter_rank": "rank",
        "use_shared_attention_adapter": "adapt_attention",
    }

    def groups(self, arch: Architecture) -> list[range]:
        return arch.inseparable

    def add_sub_layer(self, rules: Rules, arch: Architecture, layer: str, index: int) -> None:
        if not arch.specs[index].feeds_next:
            if index and arch.specs[index - 1].feeds_next:
                prefix = f"{layer}.mamba_decoder"
            else:
                prefix = layer
            rules.add(f"{prefix}.input_layernorm.weight", f"layers.{index}.norm.weight")
            rules.add_mixer(f"{prefix}.mamba", index)
            return
        first = arch.letters.index(arch.letters[index])
        number = next(number for number, group in enumerate(self.groups(arch)) if first in group)
        block_prefix = f"{self.layers}.{number}.shared_transformer"
        rules.add_mixer(block_prefix, index, BLOCK)
        rules.add_mixer(layer, index, {"linear.weight": ("linear.weight",)})
        use_number = sum(spec.feeds_next for spec in arch.specs[:index])
        for theirs, (A, *B) in PAIRS.items():
            adapter = f"{theirs}_adapter_list.{use_number}"
            rules.add_mixer(block_prefix, index, {f"{adapter}.0.weight": (A,), f"{adapter}.1.weight": tuple(B)})

    def settings(self, arch: Architecture, length: int) -> Settings:
        mamba = next(spec for spec in arch.specs if isinstance(spec, Mamba2Spec))
        block = next(spec for spec in arch.specs if isinstance(spec, SharedAttentionSpec))
        blocks = {letter for letter, spec in zip(arch.letters, arch.specs, strict=True) if spec.feeds_next}
        groups = self.groups(arch)
        return {
            **to_theirs(self.mamba, mamba.exported_options(arch.sizes)),
            **to_theirs(self.block, block.exported_options(arch.sizes)),
            "num_hidden_layers": len(groups),
            "layers_block_type": [HYBRID if len(group) > 1 else MAMBA for group in groups],
            "n_mamba_heads": mamba.num_heads(arch.sizes),
            "time_step_min": mamba.dt_floor or NO_FLOOR,
            "time_step_max": mamba.dt_max,
            "num_key_value_heads": block.groups(),
            "num_mem_blocks": len(blocks),
            "use_mem_rope": block.positions is not None,
            "max_position_embeddings": length,
            rope_parameters.PARAMETERS: rope_parameters.to_theirs(block.positions or RopeOptions()),
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        types = theirs["layers_block_type"]
        blocks = theirs.get("num_mem_blocks", 1)
        require_known(theirs, "layers_block_type", OF_TYPE)
        if len(types) != theirs["num_hidden_layers"]:
            raise ValueError(f"has {len(types)} entries in layers_block_type, must have as many as num_hidden_layers")
        if blocks > len(LETTERS):
            raise ValueError(f"has num_mem_blocks={blocks}; at most {len(LETTERS)} can be imported")
        inner = theirs["mamba_expand"] * theirs["hidden_size"]
        heads = theirs["n_mamba_heads"]
        if inner % heads:
            raise ValueError(f"has n_mamba_heads={heads}, which does not divide mamba_expand x hidden_size = {inner}")
        pattern = ""
        num_hybrid = 0
        for kind in types:
            pattern += LETTERS[num_hybrid % blocks] + "M" if OF_TYPE[kind] else "M"
            num_hybrid += OF_TYPE[kind]
        floor = theirs.get("time_step_min", 0.001)
        mamba = {
            **to_ours(self.mamba, theirs),
            "head_dim": inner // heads,
            "norm_eps": ZAMBA2_MAMBA_EPS,
            "dt_floor": floor if floor > NO_FLOOR else 0.0,
        }
        letters = dict.fromkeys(pattern.replace("M", ""), self.shared(theirs))
        return pattern, {"M": {"kind": "mamba2", **mamba}, **letters}

    def shared(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our shared block."""
        if (kv_heads := theirs.get("num_key_value_heads")) not in (None, theirs["num_attention_heads"]):
            raise ValueError(f"has num_key_value_heads={kv_heads}, must equal num_attention_heads")
        has_positions = theirs.get("use_mem_rope", False)
        return {
            "kind": "shared_attention",
            **to_ours(self.block, theirs),
            "norm_eps": theirs[self.norm_eps],
            "rope": rope_parameters.to_ours(theirs) if has_positions else NO_POSITIONS,
        }
