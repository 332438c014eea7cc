"""The checkpoint format of state-spaces/mamba, Mamba's reference implementation, for imports only.

These models are published; config.json describes their layers:

    mamba-*           Mamba-1                  ssm_cfg.layer is Mamba1, or is missing
    mamba2-*          Mamba-2                  ssm_cfg.layer is Mamba2
    mamba2attn-2.7b   Mamba-2 and attention    attn_layer_idx lists the attention layers; attn_cfg.d_conv is the size of
                                               a convolution over q, k and v

config.json has no model_type, and its keys differ from the keys in transformers. In an MLP's first matrix, the rows for
up come before the rows for gate; other formats have gate before up. The vocabulary size is rounded up to a multiple of
pad_vocab_size_multiple.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hybridtron.architecture.base import Names
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import NO_POSITIONS
from hybridtron.interop.native import ModelFormat, Settings, SubLayerNames

NORM_EPS = 1e-5  # default of the reference implementation; config.json has no key for the norm's epsilon
ATTENTION: Names = {
    "in_proj.weight": ("q.weight", "kv.weight.k", "kv.weight.v"),
    "out_proj.weight": ("out.weight",),
    "conv1d.weight": ("q_conv", "kv_conv.k", "kv_conv.v"),
    "conv1d.bias": ("q_conv_bias", "kv_conv_bias.k", "kv_conv_bias.v"),
}
MLP: Names = {
    "fc1.weight": ("gate_up.weight.up", "gate_up.weight.gate"),
    "fc2.weight": ("down.weight",),
}


class Original(ModelFormat):
    """The checkpoint format that state-spaces/mamba writes."""

    name = "state-spaces/mamba"
    embedding = "backbone.embedding.weight"
    final_norm = "backbone.norm_f.weight"
    layers = "backbone.layers"
    in_pairs = True
    sub_layers: ClassVar = {
        "attention": SubLayerNames(weights=ATTENTION),
        "swiglu": SubLayerNames("norm2", "mlp", MLP),
    }

    def model(self, theirs: Settings) -> ModelConfig:
        if not theirs.get("rms_norm", True):
            raise ValueError("has rms_norm=false; only RMSNorm can be imported")
        attention_layers = set(theirs.get("attn_layer_idx") or [])
        hidden = theirs.get("d_intermediate") or 0
        layers: dict[str, dict[str, Any]] = {"M": self._mixer(dict(theirs.get("ssm_cfg") or {}))}
        if attention_layers:
            layers["A"] = self._attention(dict(theirs["attn_cfg"]))
        if hidden:
            layers["-"] = {"kind": "swiglu", "hidden": -(-hidden // 128) * 128}
        letters = ("A" if index in attention_layers else "M" for index in range(theirs["n_layer"]))
        multiple = theirs.get("pad_vocab_size_multiple", 8)
        return ModelConfig(
            width=theirs["d_model"],
            vocab_size=-(-theirs["vocab_size"] // multiple) * multiple,
            pattern="".join(letter + "-" * bool(hidden) for letter in letters),
            layers=layers,
            tie_embeddings=theirs.get("tie_embeddings", True),
            norm_eps=NORM_EPS,
            residual_fp32=theirs.get("residual_in_fp32", True),
        )

    def _mixer(self, theirs: Settings) -> dict[str, Any]:
        kinds = {"Mamba1": "mamba", "Mamba2": "mamba2"}
        kind = theirs.pop("layer", "Mamba1")
        names = {"d_state": "state", "d_conv": "conv", "expand": "expand"}
        if kind == "Mamba1":
            names |= {"dt_rank": "dt_rank"}
        else:
            names |= {"headdim": "head_dim", "ngroups": "groups"}
        if kind not in kinds or (unknown := sorted(set(theirs) - set(names))):
            raise ValueError(
                f"has ssm_cfg.{'layer=' + kind if kind not in kinds else unknown[0]}, which is not supported"
            )
        options = {names[key]: value for key, value in theirs.items() if value != "auto"}
        return {"kind": kinds[kind], **options}

    def _attention(self, theirs: Settings) -> dict[str, Any]:
        if not theirs.pop("causal", True) or theirs.pop("qkv_proj_bias", False) or theirs.pop("out_proj_bias", False):
            raise ValueError("has attn_cfg with biases or non-causal attention, which are not supported")
        spec: dict[str, Any] = {"kind": "attention", "heads": theirs.pop("num_heads")}
        for key, name in (("num_heads_kv", "kv_heads"), ("head_dim", "head_dim")):
            if (value := theirs.pop(key, None)) is not None:
                spec[name] = value
        rotary_dim = theirs.pop("rotary_emb_dim", 0)
        taps = theirs.pop("d_conv", 0)
        spec |= {"rotary_dim": rotary_dim, "rope": {"base": float(theirs.pop("rotary_emb_base", 10000.0))}}
        if not rotary_dim:
            spec |= {"rotary_dim": None, "rope": NO_POSITIONS}
        if taps:
            spec |= {"conv": taps, "conv_bias": True, "conv_silu": False}
        if theirs:
            raise ValueError(f"has attn_cfg.{next(iter(theirs))}, which is not supported")
        return spec
