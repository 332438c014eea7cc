"""Gated DeltaNet hybrids in transformers: layers of Gated DeltaNet or full attention, each with a gated MLP.

- OLMo-Hybrid: in attention layers, the norms follow attention and MLP instead of preceding them (post-norm). The norm
  of queries and keys (QK-norm) covers all heads together.
- Qwen3-Next: QK-norm for each head, a gate on attention's output, and RoPE on only some channels. A layer has an MLP or
  experts.
- Qwen3.5: Qwen3-Next's layers with other tensor names, with experts in all layers (Qwen3_5Moe) or in none.

Published folders of Qwen's models also have layers for multi-token prediction. Those of Qwen3.5 also have a vision
model. Imports drop both.

Kimi Linear is not supported, because this package has no multi-head latent attention.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import Names
from hybridtron.architecture.gated_deltanet import GatedDeltaNetSpec
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import OLMO_HEAD_EPS, halves
from hybridtron.interop import rope_parameters
from hybridtron.interop.native import (
    MULTI_TOKEN,
    Settings,
    SubLayerNames,
    Wrapper,
    require_few_experts,
    require_known,
    to_ours,
    to_theirs,
)
from hybridtron.interop.native_pairs import BEFORE, BETWEEN, Llama, attention_of, experts_of
from hybridtron.interop.rules import TensorRule

LINEAR = "linear_attention"
FULL = "full_attention"
ROUTER: Names = {
    "gate.weight": ("router",),
    "shared_expert.gate_proj.weight": ("shared_gate_up.weight.gate",),
    "shared_expert.up_proj.weight": ("shared_gate_up.weight.up",),
    "shared_expert.down_proj.weight": ("shared_down.weight",),
    "shared_expert_gate.weight": ("shared_gate",),
}
EXPERTS: Names = {
    **ROUTER,
    "experts.*.gate_proj.weight": ("gate_up.gate",),
    "experts.*.up_proj.weight": ("gate_up.up",),
    "experts.*.down_proj.weight": ("down",),
}
FUSED_EXPERTS: Names = {
    **ROUTER,
    "experts.gate_up_proj": ("gate_up.gate", "gate_up.up"),
    "experts.down_proj": ("down",),
}


class DeltaHybrid(Llama):
    """Base class for Gated DeltaNet hybrids.

    In config.json, `layer_types` has `linear_attention` or `full_attention` for each layer.
    """

    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    letters: ClassVar[dict[str, str]]
    """Layer type -> our pattern letters. D: Gated DeltaNet, A: attention, -: MLP, +: MLP with post-norm."""

    def settings(self, arch: Architecture, length: int) -> Settings:
        spec = delta_of(arch)
        key, value = spec.head_sizes(arch.sizes)
        return super().settings(arch, length) | {
            "layer_types": [
                LINEAR if isinstance(mixer_spec, GatedDeltaNetSpec) else FULL for mixer_spec in halves(arch)[0]
            ],
            "linear_num_key_heads": spec.num_key_heads,
            "linear_num_value_heads": spec.heads,
            "linear_key_head_dim": key,
            "linear_value_head_dim": value,
            "linear_conv_kernel_dim": spec.conv,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        pattern = "".join(self.layer_letters(theirs))
        translations = {
            "D": self.delta,
            "A": self.attention,
            "-": self.mlp,
            "+": self.mlp_with_post_norm,
            "E": self.experts,
        }
        return pattern, {letter: options(theirs) for letter, options in translations.items() if letter in pattern}

    def layer_letters(self, theirs: Settings) -> list[str]:
        """Return our letters for each layer. Raises ValueError for a layer type that we don't have."""
        require_known(theirs, "layer_types", self.letters)
        return [self.letters[name] for name in theirs["layer_types"]]

    def mlp_with_post_norm(self, theirs: Settings) -> Settings:
        """Translate config.json to options for an MLP with post-norm."""
        return {**self.mlp(theirs), "norm_after": True}

    def experts(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our experts. Raises ValueError for a class without experts."""
        raise ValueError("has experts, which this class does not have")

    def delta(self, theirs: Settings) -> Settings:
        """Translate config.json to options for our Gated DeltaNet."""
        key_channels = theirs["linear_num_key_heads"] * theirs["linear_key_head_dim"]
        value_channels = theirs["linear_num_value_heads"] * theirs["linear_value_head_dim"]
        names = {"linear_num_value_heads": "heads", "linear_num_key_heads": "key_heads"}
        return {
            "kind": "gated_deltanet",
            **to_ours({**names, "linear_conv_kernel_dim": "conv"}, theirs),
            "expand_k": key_channels / theirs["hidden_size"],
            "expand_v": value_channels / theirs["hidden_size"],
        }

    def attention(self, theirs: Settings) -> Settings:
        return super().attention(theirs) | {"norm_eps": theirs[self.norm_eps]}


class OlmoHybrid(DeltaHybrid):
    """OLMo-Hybrid. Exports have the tensor names of the published files.

    If transformers loads and saves a model, some norms get other names. `also` maps the published names to the other
    names. Imports accept both.
    """

    name = "OlmoHybridForCausalLM"
    model_type = "olmo_hybrid"
    letters: ClassVar = {LINEAR: "D-", FULL: "A+"}
    before: ClassVar[str] = "attention_layer_norm"
    between: ClassVar[str] = "feedforward_layer_norm"
    also: ClassVar = {before: BEFORE, between: BETWEEN, BETWEEN: between}

    def names_of(self, arch: Architecture, index: int) -> SubLayerNames:
        if index % 2:
            return SubLayerNames("post_feedforward_layernorm" if arch.specs[index].norm_after else self.between, "mlp")
        if isinstance(arch.specs[index], AttentionSpec):
            return SubLayerNames(BETWEEN, "self_attn")
        return SubLayerNames(self.before, "linear_attn")

    def rules(self, arch: Architecture) -> list[TensorRule]:
        return [self._with_both_names(rule) for rule in super().rules(arch)]

    def _with_both_names(self, rule: TensorRule) -> TensorRule:
        layer, _, name = rule.theirs.removesuffix(".weight").rpartition(".")
        if name in self.also:
            return replace(rule, also=f"{layer}.{self.also[name]}.weight")
        return rule

    def settings(self, arch: Architecture, length: int) -> Settings:
        negative_eigenvalues = delta_of(arch).negative_eigenvalues
        return super().settings(arch, length) | {"linear_allow_neg_eigval": negative_eigenvalues}

    def positions(self, spec: AttentionSpec) -> Settings:
        return super().positions(spec) | ({"rope_theta": None} if spec.positions is None else {})

    def delta(self, theirs: Settings) -> Settings:
        negative_eigenvalues = theirs.get("linear_allow_neg_eigval", True)
        return super().delta(theirs) | {"negative_eigenvalues": negative_eigenvalues, "norm_eps": OLMO_HEAD_EPS}

    def attention(self, theirs: Settings) -> Settings:
        return super().attention(theirs) | {"qk_norm": "all", "norm_after": True}


class Qwen3Next(DeltaHybrid):
    """Qwen3-Next.

    In a fused projection, such as the projection to q, k, v and z, the rows are ordered by head: all rows for head 0 in
    the order q, k, v, z, then all rows for head 1, and so on. For each norm except the gated norm in Gated DeltaNet,
    files store the weight minus 1.
    """

    name = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"
    letters: ClassVar = {LINEAR: "D-", FULL: "A-"}
    delta_names: ClassVar[Names] = {
        "in_proj_qkvz.weight": tuple(f"in_proj.weight.{part}" for part in "qkvz"),
        "in_proj_ba.weight": ("ab_proj.weight.b", "ab_proj.weight.a"),
        "conv1d.weight": tuple(f"conv_weight.{part}" for part in "qkv"),
        "norm.weight": ("norm_weight",),
        "out_proj.weight": ("out_proj.weight",),
        "dt_bias": ("dt_bias",),
        "A_log": ("A_log",),
    }
    attention_names: ClassVar[Names] = {
        "q_proj.weight": ("q.weight", "gate.weight"),
        "k_proj.weight": ("kv.weight.k",),
        "v_proj.weight": ("kv.weight.v",),
        "o_proj.weight": ("out.weight",),
        "q_norm.weight": ("q_norm_weight",),
        "k_norm.weight": ("k_norm_weight",),
    }
    sub_layers: ClassVar = {
        "gated_deltanet": SubLayerNames(BEFORE, "linear_attn", delta_names),
        "attention": SubLayerNames(BEFORE, "self_attn", attention_names),
        "swiglu": SubLayerNames(BETWEEN, "mlp"),
        "moe": SubLayerNames(BETWEEN, "mlp", EXPERTS),
    }
    expert_options: ClassVar = {
        "num_experts": "experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "hidden",
        "shared_expert_intermediate_size": "shared",
    }
    added_to_one: ClassVar = (f"{BEFORE}.weight", f"{BETWEEN}.weight", "q_norm.weight", "k_norm.weight")

    dropped: ClassVar = MULTI_TOKEN

    def rules(self, arch: Architecture) -> list[TensorRule]:
        blocks = self.blocks(arch)
        return [self._as_stored(rule, blocks) for rule in super().rules(arch)]

    def blocks(self, arch: Architecture) -> dict[str, int]:
        """Return the end of a fused tensor's name -> number of heads by which the tensor's rows are ordered."""
        key_heads = delta_of(arch).num_key_heads
        heads = attention_of(arch).heads
        return {"in_proj_qkvz.weight": key_heads, "in_proj_ba.weight": key_heads, "self_attn.q_proj.weight": heads}

    def _as_stored(self, rule: TensorRule, blocks: dict[str, int]) -> TensorRule:
        if rule.theirs.endswith(self.added_to_one) or rule.theirs == self.final_norm:
            return replace(rule, less_one=True, fp32=True)
        heads = next((heads for name, heads in blocks.items() if rule.theirs.endswith(name)), 1)
        return replace(rule, blocks=heads)

    def settings(self, arch: Architecture, length: int) -> Settings:
        spec = attention_of(arch)
        common = super().settings(arch, length)
        rotary_part = spec.rotary(arch.sizes) / spec.head(arch.sizes)
        rope = {**common["rope_parameters"], "partial_rotary_factor": rotary_part}
        return common | {"rope_parameters": rope, "partial_rotary_factor": rotary_part}

    def mlp_settings(self, arch: Architecture) -> Settings:
        """Return the entries for MLPs and experts. transformers needs the MLPs' size even if the model has none."""
        experts = experts_of(arch)
        if experts is None:
            return {**super().mlp_settings(arch), "num_experts": 0, "mlp_only_layers": []}
        mlps = halves(arch)[1]
        dense = [spec.hidden for spec in mlps if isinstance(spec, SwiGLUSpec)]
        return {
            **to_theirs(self.expert_options, experts.exported_options(arch.sizes)),
            "norm_topk_prob": experts.normalise,
            self.hidden: next(iter(dense), experts.shared),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, spec in enumerate(mlps) if isinstance(spec, SwiGLUSpec)],
        }

    def experts(self, theirs: Settings) -> Settings:
        require_few_experts(theirs["num_experts"], theirs["num_hidden_layers"])
        options = to_ours(self.expert_options, theirs)
        return {"kind": "moe", "shared_gate": True, "normalise": theirs.get("norm_topk_prob", True), **options}

    def layer_letters(self, theirs: Settings) -> list[str]:
        """Return our letters for each layer. Published folders have an interval instead of the layers' types."""
        layers = theirs["num_hidden_layers"]
        if theirs.get("layer_types") is None:
            interval = theirs.get("full_attention_interval", 4)  # the default in transformers
            types = [LINEAR if number % interval else FULL for number in range(1, layers + 1)]
            theirs = {**theirs, "layer_types": types}
        pairs = super().layer_letters(theirs)
        return [f"{pair[0]}E" if self.has_experts(theirs, layer) else pair for layer, pair in enumerate(pairs)]

    def has_experts(self, theirs: Settings, layer: int) -> bool:
        """Return True if a layer has experts instead of an MLP."""
        if theirs.get("num_experts", 0) == 0 or layer in (theirs.get("mlp_only_layers") or []):
            return False
        return (layer + 1) % theirs.get("decoder_sparse_step", 1) == 0

    def delta(self, theirs: Settings) -> Settings:
        return super().delta(theirs) | {"norm_eps": theirs[self.norm_eps]}

    def attention(self, theirs: Settings) -> Settings:
        rope = theirs.get("rope_parameters") or {}
        options = super().attention(theirs)
        rotary_part = rope.get("partial_rotary_factor") or theirs.get("partial_rotary_factor") or 0.25
        return options | {"rotary_dim": int(options["head_dim"] * rotary_part), "qk_norm": "head", "gate": True}


class Qwen35(Qwen3Next):
    """Qwen3.5 without experts.

    Only attention's queries and gates are fused by head. Published folders name the class with the vision model, and
    tensor names begin with `model.language_model.` instead of `model.`. Their RoPE has sections for pictures, which
    have no effect on text.
    """

    name = "Qwen3_5ForCausalLM"
    model_type = "qwen3_5_text"
    wrapper = Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5")
    fixed: ClassVar = DeltaHybrid.fixed
    delta_names: ClassVar[Names] = {
        "in_proj_qkv.weight": tuple(f"in_proj.weight.{part}" for part in "qkv"),
        "in_proj_z.weight": ("in_proj.weight.z",),
        "in_proj_b.weight": ("ab_proj.weight.b",),
        "in_proj_a.weight": ("ab_proj.weight.a",),
        **{name: keys for name, keys in Qwen3Next.delta_names.items() if not name.startswith("in_proj")},
    }
    sub_layers: ClassVar = {
        **Qwen3Next.sub_layers,
        "gated_deltanet": SubLayerNames(BEFORE, "linear_attn", delta_names),
    }
    dropped: ClassVar = {**MULTI_TOKEN, "model.visual.": "a vision model"}
    sections: ClassVar = ("mrope_section", "mrope_interleaved")

    def rules(self, arch: Architecture) -> list[TensorRule]:
        return [self._with_both_names(rule) for rule in super().rules(arch)]

    def _with_both_names(self, rule: TensorRule) -> TensorRule:
        if not rule.theirs.startswith("model."):
            return rule
        return replace(rule, also=rule.theirs.replace("model.", "model.language_model.", 1), memory=rule.theirs)

    def blocks(self, arch: Architecture) -> dict[str, int]:
        return {"self_attn.q_proj.weight": attention_of(arch).heads}

    def mlp_settings(self, arch: Architecture) -> Settings:
        return DeltaHybrid.mlp_settings(self, arch)

    def has_experts(self, theirs: Settings, layer: int) -> bool:
        return False

    def attention(self, theirs: Settings) -> Settings:
        rope = theirs.get(rope_parameters.PARAMETERS) or {}
        without_sections = {key: value for key, value in rope.items() if key not in self.sections}
        return super().attention({**theirs, rope_parameters.PARAMETERS: without_sections})


class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts in all layers.

    A layer's experts are in two tensors, whose first dimension counts the experts, as in published folders. If
    transformers loads and saves such a folder, each expert gets its own tensors. Imports accept both.

    Exports have Qwen3-Next's class unless this class is asked for. For this class, transformers 5.24 ignores the
    tokenizer's class in the folder, and takes the class of Qwen3.5's tokenizer.
    """

    name = "Qwen3_5MoeForCausalLM"
    model_type = "qwen3_5_moe_text"
    wrapper = Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
    sub_layers: ClassVar = {**Qwen35.sub_layers, "moe": SubLayerNames(BETWEEN, "mlp", FUSED_EXPERTS)}

    def rules_for(self, arch: Architecture, names: Collection[str]) -> list[TensorRule]:
        if any(name.endswith("mlp.experts.0.down_proj.weight") for name in names):
            return Qwen35MoeOfTransformers().named_rules(arch, names)
        return self.named_rules(arch, names)

    def mlp_settings(self, arch: Architecture) -> Settings:
        experts = experts_of(arch)
        assert experts is not None
        return to_theirs(self.expert_options, experts.exported_options(arch.sizes))

    def has_experts(self, theirs: Settings, layer: int) -> bool:
        return True

    def experts(self, theirs: Settings) -> Settings:
        return {**super().experts(theirs), "normalise": True}  # whatever norm_topk_prob says


class Qwen35MoeOfTransformers(Qwen35Moe):
    """Qwen3.5 with experts, in the names that transformers writes."""

    sub_layers: ClassVar = {**Qwen35Moe.sub_layers, "moe": SubLayerNames(BETWEEN, "mlp", EXPERTS)}


def delta_of(arch: Architecture) -> GatedDeltaNetSpec:
    """Return the spec that all Gated DeltaNet sub-layers share.

    If the model has no such sub-layer, return a spec with one head: config.json needs values even then.
    """
    return next((spec for spec in arch.specs if isinstance(spec, GatedDeltaNetSpec)), GatedDeltaNetSpec(heads=1))
