"""megatron-core's GPTModel with Llama's layers: names of its tensors, and Megatron-LM's arguments for them.

A layer is RMSNorm, attention with grouped queries and rotary positions, RMSNorm, and a SwiGLU MLP. In `linear_qkv` each
group has the rows of its query heads, then of its key head, then of its value head. `linear_fc1` has the rows of the
gate, then those of `up`. Both norms of a layer are named after the projection that follows them, because Transformer
Engine fuses the two.

The tensors determine all sizes but one: the number of heads. Three arguments describe what no tensor shows: the heads,
the base of rotary positions, and the epsilon of norms. In names here, `theirs` means these arguments.

core's hybrids with Mamba-2 are refused: core builds them only with mamba-ssm and Transformer Engine, so no logits were
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import Names
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture
from hybridtron.config.export_class import CannotExport, misfit_of
from hybridtron.interop.native import ModelFormat, Settings, SubLayerNames
from hybridtron.interop.native_pairs import attention_of
from hybridtron.interop.rules import Rules, TensorRule

QKV = "self_attention.linear_qkv.weight"
PROJ = "self_attention.linear_proj.weight"
FC1 = "mlp.linear_fc1.weight"
FC2 = "mlp.linear_fc2.weight"
LAYERS = "decoder.layers"
ATTENTION: Names = {
    "linear_qkv.weight": ("q.weight", "kv.weight.k", "kv.weight.v"),
    "linear_proj.weight": ("out.weight",),
}
MLP: Names = {
    "linear_fc1.weight": ("gate_up.weight.gate", "gate_up.weight.up"),
    "linear_fc2.weight": ("down.weight",),
}
EPS = "norm_epsilon"  # the argument of Megatron-LM; `layernorm_epsilon` in its newer versions
FIXED: Settings = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "swiglu": True,
    "squared_relu": False,
    "quick_geglu": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "num_experts": None,
    "mtp_num_layers": None,
    "use_mup": False,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
}
"""Arguments that change what a model computes -> their only value for Llama's layers.

Exports write them. Imports require them, but older folders lack some, and then the value is that of Megatron-LM's code
at the time: the one here.
"""


class CoreGPT(ModelFormat):
    """megatron-core's GPTModel with Llama's layers."""

    name = "megatron-core's GPTModel"
    embedding = "embedding.word_embeddings.weight"
    final_norm = "decoder.final_layernorm.weight"
    head = "output_layer.weight"
    layers = LAYERS
    in_pairs = True
    dropped: ClassVar[Mapping[str, str]] = {"optimizer.": "the optimizer's state"}
    sub_layers: ClassVar = {
        "attention": SubLayerNames("self_attention.linear_qkv.layer_norm_weight", "self_attention", ATTENTION),
        "swiglu": SubLayerNames("mlp.linear_fc1.layer_norm_weight", "mlp", MLP),
    }

    def model(self, theirs: Settings) -> ModelConfig:
        attention = {
            "kind": "attention",
            "heads": theirs["num_attention_heads"],
            "kv_heads": theirs["num_query_groups"],
            "head_dim": theirs["kv_channels"],
            "rope": {"base": float(theirs["rotary_base"])},
        }
        return ModelConfig(
            width=theirs["hidden_size"],
            vocab_size=theirs["padded_vocab_size"],
            pattern=f"(A-)*{theirs['num_layers']}",
            layers={"A": attention, "-": {"kind": "swiglu", "hidden": theirs["ffn_hidden_size"]}},
            tie_embeddings=not theirs["untie_embeddings_and_output_weights"],
            norm_eps=theirs[EPS],
            residual_fp32=theirs.get("fp32_residual_connection", False),
        )

    def rules(self, arch: Architecture) -> list[TensorRule]:
        groups = attention_of(arch).groups()
        return [replace(rule, blocks=groups) if rule.theirs.endswith(QKV) else rule for rule in super().rules(arch)]

    def add_sub_layer(self, rules: Rules, arch: Architecture, layer: str, index: int) -> None:
        norm, mixer, weights = self.names_of(arch, index)
        rules.add(f"{layer}.{norm}", f"layers.{index}.norm.weight")
        rules.add_mixer(f"{layer}.{mixer}", index, weights)


def require_fitting(arch: Architecture) -> None:
    """Raise CannotExport, with the reason, if GPTModel does not compute exactly this model."""
    reason = misfit_of(arch, "LlamaForCausalLM")
    if reason is None and (rope := attention_of(arch).positions) is not None and rope.scale is not None:
        reason = f"its rotary positions are scaled (rope.scale={rope.scale})"
    if reason is not None:
        raise CannotExport(
            f"{CoreGPT.name} does not fit {arch.model.pattern}: {reason}; for our own keys use --to dcp",
            code="unsupported",
        )


def arguments_of(arch: Architecture, length: int) -> Settings:
    """Return Megatron-LM's arguments for a model. `length` is the longest row in tokens."""
    attention = attention_of(arch)
    assert isinstance(attention, AttentionSpec)
    positions = attention.positions
    assert positions is not None
    base = positions.base
    sizes = theirs_of_shapes({rule.theirs: rule.shape for rule in CoreGPT().rules(arch)}, attention.heads)
    return (
        FIXED
        | sizes
        | {
            "num_attention_heads": attention.heads,
            "group_query_attention": True,
            "rotary_base": int(base) if base.is_integer() else base,
            EPS: arch.model.norm_eps,
            "layernorm_epsilon": arch.model.norm_eps,
            "fp32_residual_connection": arch.model.residual_fp32,
            "add_position_embedding": True,
            "max_position_embeddings": length,
            "seq_length": length,
        }
    )


def theirs_of_shapes(shapes: Mapping[str, tuple[int, ...]], heads: int) -> Settings:
    """Return the arguments that follow from the shapes of a model's tensors and the number of heads.

    Raises ValueError if the shapes do not fit each other, or if `heads` does not fit them.
    """
    wanted = [CoreGPT.embedding, *(f"{LAYERS}.0.{name}" for name in (QKV, PROJ, FC1, FC2))]
    if missing := [name for name in wanted if len(shapes.get(name, ())) != 2]:
        raise ValueError(f"has no matrix {missing[0]}")
    vocab, width = shapes[wanted[0]]
    rows = shapes[wanted[1]][0]
    queries = shapes[wanted[2]][1]
    gate_up = shapes[wanted[3]][0]
    hidden = shapes[wanted[4]][1]
    if gate_up != 2 * hidden:
        raise ValueError(f"has {FC1} with {gate_up} rows for {hidden} inner channels; a gated MLP has twice as many")
    if queries % heads:
        raise ValueError(f"has {queries} rows for queries, which {heads} heads can't divide")
    head_dim = queries // heads
    pairs = rows - queries
    if pairs <= 0 or pairs % (2 * head_dim):
        raise ValueError(f"has {pairs} rows for keys and values, which heads of {head_dim} channels can't divide")
    return {
        "num_layers": len({name.split(".")[2] for name in shapes if name.startswith(f"{LAYERS}.")}),
        "hidden_size": width,
        "ffn_hidden_size": hidden,
        "num_query_groups": pairs // (2 * head_dim),
        "kv_channels": head_dim,
        "padded_vocab_size": vocab,
        "untie_embeddings_and_output_weights": CoreGPT.head in shapes,
    }


def faults_of(stored: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    """Yield each difference between the arguments of a folder, `stored`, and the model that its tensors describe."""
    for name, value in FIXED.items():
        if name in stored and stored[name] != value:
            yield f"{name} is {stored[name]!r}; only {value!r} can be imported"
    completed = dict(stored)
    if not stored.get("group_query_attention", True):
        completed["num_query_groups"] = stored.get("num_attention_heads")
    for name, value in settings.items():
        if completed.get(name) is not None and completed[name] != value:
            yield f"{name} is {completed[name]!r}, but the tensors have {value!r}"
