"""Falcon-H1: layers of Mamba-2 and full attention in parallel, followed by a gated MLP, with many multipliers.

A layer in transformers is three sub-layers here: Mamba-2, attention and MLP.

config.json has multipliers for the inputs to Mamba-2 and to attention, which our configuration does not have. Both
inputs are first projected by linear layers. So an import folds the input multiplier m into later multipliers:

- Mamba-2: the multipliers of the projections z, x, B, C and dt are multiplied by m.
- Attention: q and k are both proportional to the input, so the scale of the scores q . k is multiplied by m squared. v
  is proportional to the input too, so the output multiplier is multiplied by m.

Exports write 1 for the input multipliers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture
from hybridtron.interop.native import Settings, SubLayerNames
from hybridtron.interop.native_pairs import BEFORE, Mamba2Hybrid, attention_of

PARTS = ("z", "x", "B", "C", "dt")  # the order of `ssm_multipliers`
NUMBER_OF = {"ssm_multipliers": len(PARTS), "mlp_multipliers": 2}  # lengths of these lists in config.json


class FalconH1(Mamba2Hybrid):
    """Falcon-H1, with or without the gated norm in Mamba-2."""

    name = "FalconH1ForCausalLM"
    model_type = "falcon_h1"
    final_norm: ClassVar[str] = "model.final_layernorm.weight"
    sub_layers: ClassVar = {
        "mamba2": SubLayerNames(BEFORE, "mamba"),
        "attention": SubLayerNames("", "self_attn"),
        "swiglu": SubLayerNames("pre_ff_layernorm", "feed_forward"),
    }
    fixed: ClassVar = {**Mamba2Hybrid.fixed, "projectors_bias": False}

    def groups(self, arch: Architecture) -> list[range]:
        return [range(first, first + 3) for first in range(0, len(arch.specs), 3)]

    def settings(self, arch: Architecture, length: int) -> Settings:
        mamba = arch.specs[0]
        attention = attention_of(arch)
        mlp = arch.specs[2]
        assert isinstance(mamba, Mamba2Spec)
        assert isinstance(mlp, SwiGLUSpec)
        return {
            **super().settings(arch, length),
            "mamba_d_ssm": mamba.inner(arch.sizes),
            "mamba_rms_norm": mamba.norm,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": arch.model.embedding_multiplier,
            "lm_head_multiplier": 1 / arch.logits_scaling,
            "ssm_in_multiplier": 1.0,
            "ssm_multipliers": [getattr(mamba.multipliers, part) for part in PARTS],
            "ssm_out_multiplier": mamba.output_multiplier,
            "attention_in_multiplier": 1.0,
            "key_multiplier": attention.query_factor(attention.head(arch.sizes)),
            "attention_out_multiplier": attention.output_multiplier,
            "mlp_multipliers": [mlp.gate_multiplier, mlp.output_multiplier],
        }

    def model(self, theirs: Settings) -> ModelConfig:
        model = super().model(theirs)
        logits_multiplier = theirs.get("lm_head_multiplier", 1.0)
        return replace(
            model, embedding_multiplier=theirs.get("embedding_multiplier", 1.0), logits_scaling=1 / logits_multiplier
        )

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        gate, output = numbers(theirs, "mlp_multipliers")
        mlp = {"hidden": theirs[self.hidden], "gate_multiplier": gate, "output_multiplier": output}
        layers = {"M": self.mamba_options(theirs), "A": self.attention(theirs), "-": {"kind": "swiglu", **mlp}}
        return f"(MA-)*{theirs['num_hidden_layers']}", layers

    def attention(self, theirs: Settings) -> Settings:
        options = super().attention(theirs)
        input_multiplier = theirs.get("attention_in_multiplier", 1.0)
        factor = theirs.get("key_multiplier", 1.0) * input_multiplier**2
        return options | {
            "beside": True,
            "scale": None if factor == 1 else factor * options["head_dim"] ** -0.5,
            "output_multiplier": theirs.get("attention_out_multiplier", 1.0) * input_multiplier,
        }

    def mamba_options(self, theirs: Settings) -> Settings:
        if theirs.get("mamba_rms_norm", False) and theirs.get("mamba_norm_before_gate", True):
            raise ValueError("has mamba_norm_before_gate=True; only False can be imported where mamba_rms_norm is True")
        input_multiplier = theirs.get("ssm_in_multiplier", 1.0)
        part_multipliers = zip(PARTS, numbers(theirs, "ssm_multipliers"), strict=True)
        return super().mamba_options(theirs) | {
            "heads": theirs["mamba_n_heads"],
            "norm": theirs.get("mamba_rms_norm", False),
            "multipliers": {part: input_multiplier * multiplier for part, multiplier in part_multipliers},
            "output_multiplier": theirs.get("ssm_out_multiplier", 1.0),
        }

    def inner(self, theirs: Settings) -> int:
        return theirs.get("mamba_d_ssm") or super().inner(theirs)


def numbers(theirs: Settings, key: str) -> list[float]:
    """Read a list of multipliers from config.json. They are all 1 if the key is missing.

    Raises ValueError if the list has a wrong length.
    """
    multipliers = theirs.get(key)
    if multipliers is None:
        multipliers = [1.0] * NUMBER_OF[key]
    if len(multipliers) != NUMBER_OF[key]:
        raise ValueError(f"has {len(multipliers)} entries in {key}, must have {NUMBER_OF[key]}")
    return multipliers
