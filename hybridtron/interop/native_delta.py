"""Gated DeltaNet hybrids in transformers: layers of Gated DeltaNet or full attention, each with a gated MLP.

- OLMo-Hybrid: in attention layers, the norms follow attention and MLP instead of preceding them (post-norm). The norm
  of queries and keys (QK-norm) covers all heads together.
- Qwen3-Next: QK-norm for each head, a gate on attention's output, and RoPE on only some channels. Qwen3-Next with
  experts is not supported, because this package has no experts.

Kimi Linear is not supported, because this package has no multi-head latent attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import Names
from hybridtron.architecture.gated_deltanet import GatedDeltaNetSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.hf_compat import OLMO_HEAD_EPS, halves
from hybridtron.interop.native import Settings, SubLayerNames, require_known, to_ours
from hybridtron.interop.native_pairs import BEFORE, BETWEEN, Llama, attention_of
from hybridtron.interop.rules import TensorRule

LINEAR = "linear_attention"
FULL = "full_attention"


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
        require_known(theirs, "layer_types", self.letters)
        pattern = "".join(self.letters[name] for name in theirs["layer_types"])
        mlp = super().pattern(theirs)[1]["-"]
        all_options = {"D": self.delta(theirs), "A": self.attention(theirs), "-": mlp, "+": {**mlp, "norm_after": True}}
        return pattern, {letter: options for letter, options in all_options.items() if letter in pattern}

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
    """Qwen3-Next without experts.

    In a fused projection, such as the projection to q, k, v and z, the rows are ordered by head: all rows for head 0 in
    the order q, k, v, z, then all rows for head 1, and so on. For each norm except the gated norm in Gated DeltaNet,
    files store the weight minus 1.
    """

    name = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"
    letters: ClassVar = {LINEAR: "D-", FULL: "A-"}
    fixed: ClassVar = {**DeltaHybrid.fixed, "num_experts": 0}
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
    }
    added_to_one: ClassVar = (f"{BEFORE}.weight", f"{BETWEEN}.weight", "q_norm.weight", "k_norm.weight")

    def rules(self, arch: Architecture) -> list[TensorRule]:
        key_heads = delta_of(arch).num_key_heads
        heads = attention_of(arch).heads
        blocks = {"in_proj_qkvz.weight": key_heads, "in_proj_ba.weight": key_heads, "self_attn.q_proj.weight": heads}
        return [self._as_stored(rule, blocks) for rule in super().rules(arch)]

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
        return common | {"rope_parameters": rope, "partial_rotary_factor": rotary_part, "mlp_only_layers": []}

    def delta(self, theirs: Settings) -> Settings:
        return super().delta(theirs) | {"norm_eps": theirs[self.norm_eps]}

    def attention(self, theirs: Settings) -> Settings:
        rope = theirs.get("rope_parameters") or {}
        options = super().attention(theirs)
        rotary_part = rope.get("partial_rotary_factor") or theirs.get("partial_rotary_factor") or 0.25
        return options | {"rotary_dim": int(options["head_dim"] * rotary_part), "qk_norm": "head", "gate": True}


def delta_of(arch: Architecture) -> GatedDeltaNetSpec:
    """Return the spec that all Gated DeltaNet sub-layers share.

    If the model has no such sub-layer, return a spec with one head: config.json needs values even then.
    """
    return next((spec for spec in arch.specs if isinstance(spec, GatedDeltaNetSpec)), GatedDeltaNetSpec(heads=1))
