"""Nemotron-H: each layer is Mamba-2, full attention without positions, an MLP with squared ReLU, or experts.

Each expert is such an MLP. The router adds a correction to sigmoid scores; the correction is a buffer in transformers.
Each layer with experts has a shared expert, which may have another size than the routed experts.

Published folders of Nemotron 3 Super also have layers for multi-token prediction, which the model itself does not read.
Imports leave them out, as transformers does; exports have none.

transformers clamps Mamba-2's step sizes to at least `time_step_min` in full forward passes, but not in generation. The
models were trained without this clamp: `time_step_min` was only used for initialization. So exports write a
`time_step_min` that is too small to have an effect. The proof of an import loads the folder with that value too.

config.json can have the layer types in two forms. Imports read both. Exports write the second, as published folders do:

    layers_block_type         a list. SGLang 0.5 knows only its earlier names (`mamba`), and transformers before 5.18
                              only the new ones. From the list alone, llama.cpp does not recognize dense MLPs
    hybrid_override_pattern   a string with a letter per layer, which all of them understand

Two settings have two names: `rms_norm_eps` is for llama.cpp, and `mamba_n_groups` for SGLang.

Exports write the key `num_experts_per_tok` only for models with experts, because converters treat every model with this
key as a mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.rope import NO_POSITIONS
from hybridtron.architecture.squared_relu import SquaredReLUSpec
from hybridtron.architecture.table import Architecture
from hybridtron.interop.native import (
    MULTI_TOKEN,
    NO_FLOOR,
    Native,
    Settings,
    SubLayerNames,
    require_few_experts,
    require_known,
    to_ours,
    to_theirs,
)
from hybridtron.interop.native_pairs import attention_of, attention_options
from hybridtron.interop.rules import TensorRule

TYPES = "layers_block_type"
PATTERN = "hybrid_override_pattern"
# our pattern letter -> (layer type in transformers, layer type in earlier versions of transformers, letter in
# hybrid_override_pattern)
LAYERS = {
    "M": ("linear_attention", "mamba", "M"),
    "A": ("full_attention", "attention", "*"),
    "-": ("mlp", "mlp", "-"),
    "E": ("moe", "moe", "E"),
}
EXPERTS: Names = {
    "gate.weight": ("router",),
    "gate.e_score_correction_bias": ("correction",),
    "fc1_latent_proj.weight": ("latent_in",),
    "fc2_latent_proj.weight": ("latent_out",),
    "experts.*.up_proj.weight": ("gate_up",),
    "experts.*.down_proj.weight": ("down",),
    "shared_experts.up_proj.weight": ("shared_gate_up.weight",),
    "shared_experts.down_proj.weight": ("shared_down.weight",),
}


class NemotronH(Native):
    """Nemotron-H.

    Tensor names begin with `backbone.` in published files, but with `model.` in the class of transformers.
    """

    name = "NemotronHForCausalLM"
    model_type = "nemotron_h"
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"
    layers = "backbone.layers"
    norm_eps = "layer_norm_epsilon"
    sub_layers: ClassVar = {"moe": SubLayerNames(weights=EXPERTS)}
    fixed: ClassVar = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "tie_word_embeddings"), False),
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "sliding_window": None,
    }
    proven_with: ClassVar = {"time_step_min": NO_FLOOR}
    dropped: ClassVar = MULTI_TOKEN
    mamba: ClassVar = {
        "ssm_state_size": "state",
        "mamba_num_heads": "heads",
        "mamba_head_dim": "head_dim",
        "n_groups": "groups",
        "conv_kernel": "conv",
    }
    experts: ClassVar = {
        "n_routed_experts": "experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "hidden",
        "moe_shared_expert_intermediate_size": "shared",
        "routed_scaling_factor": "scale",
        "norm_topk_prob": "normalise",
    }

    def rules(self, arch: Architecture) -> list[TensorRule]:
        return [self._with_both_names(rule) for rule in super().rules(arch)]

    def _with_both_names(self, rule: TensorRule) -> TensorRule:
        module_name = rule.theirs.replace("backbone.", "model.", 1)
        return replace(rule, also=module_name, memory=module_name)

    def settings(self, arch: Architecture, length: int) -> Settings:
        mamba = next(spec for spec in arch.specs if isinstance(spec, Mamba2Spec))
        attention = attention_of(arch)
        letters = {"mamba2": "M", "attention": "A", "squared_relu": "-", "moe": "E"}
        layer_names = [LAYERS[letters[spec.kind]] for spec in arch.specs]
        heads = mamba.num_heads(arch.sizes)
        return {
            **to_theirs(self.mamba, mamba.exported_options(arch.sizes) | {"heads": heads}),
            "mamba_n_groups": mamba.groups,
            "rms_norm_eps": arch.model.norm_eps,
            PATTERN: "".join(type_names[-1] for type_names in layer_names),
            "num_hidden_layers": len(layer_names),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.groups(),
            "head_dim": attention.head(arch.sizes),
            "attention_dropout": 0.0,
            "num_nextn_predict_layers": 0,
            **self.mlp_settings(arch),
            "max_position_embeddings": length,
            "residual_in_fp32": arch.model.residual_fp32,
            **self.proven_with,
        }

    def mlp_settings(self, arch: Architecture) -> Settings:
        """Return the entries in config.json for MLPs and experts.

        transformers needs the size of dense MLPs even if the model has none. Published folders then have an expert's.
        """
        hidden = [spec.hidden for spec in arch.specs if isinstance(spec, SquaredReLUSpec | MoESpec)]
        dense = [spec.hidden for spec in arch.specs if isinstance(spec, SquaredReLUSpec)]
        settings: Settings = {"intermediate_size": (dense or hidden)[0]}
        for spec in arch.specs:
            if isinstance(spec, MoESpec):
                settings |= to_theirs(self.experts, spec.exported_options(arch.sizes))
                settings |= {
                    "moe_latent_size": spec.latent,
                    "n_shared_experts": 1,
                    "n_group": spec.groups,
                    "topk_group": spec.group_limit or 1,
                }
        return settings

    def model(self, theirs: Settings) -> ModelConfig:
        return replace(super().model(theirs), residual_fp32=theirs.get("residual_in_fp32", False))

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        key = TYPES if theirs.get(TYPES) is not None else PATTERN
        letter_of_type = {name: letter for letter, names in LAYERS.items() for name in names}
        require_known(theirs, key, letter_of_type)
        pattern = "".join(letter_of_type[name] for name in theirs[key])
        if "A" not in pattern:
            raise ValueError(f"has {key} without attention; transformers can't generate with such a model")
        layers = {
            "M": {"kind": "mamba2", **to_ours(self.mamba, theirs), "norm_eps": theirs[self.norm_eps]},
            "A": self.attention(theirs),
            "-": {"kind": "squared_relu", "hidden": theirs["intermediate_size"]},
        }
        if "E" in pattern:
            require_few_experts(theirs["n_routed_experts"], len(pattern))
            layers["E"] = self.expert_options(theirs)
        return pattern, {letter: options for letter, options in layers.items() if letter in pattern}

    def expert_options(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our experts. Raises ValueError for a feature that we don't have."""
        if (shared := theirs.get("n_shared_experts", 1)) != 1:
            raise ValueError(f"has n_shared_experts={shared!r}; only 1 can be imported")
        options = {
            "kind": "moe",
            **to_ours(self.experts, theirs),
            "activation": "squared_relu",
            "scores": "sigmoid",
            "balance": "bias",
            "latent": theirs.get("moe_latent_size"),
        }
        groups = theirs.get("n_group", 1)
        limit = theirs.get("topk_group", 1)
        if limit < groups:  # otherwise a token may choose from all groups
            options |= {"groups": groups, "group_limit": limit}
        return options

    def attention(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our attention.

        The key for the size of a head is `attention_head_dim` in published folders, else `head_dim`.
        """
        return attention_options(theirs, theirs.get("head_dim") or theirs["attention_head_dim"], NO_POSITIONS)
