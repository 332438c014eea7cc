"""Models that transformers knows by itself: which of ours they are, exactly, and how both are recognized.

Here Mamba-1 and Mamba-2 alone (MambaForCausalLM, Mamba2ForCausalLM); those with MLPs stand in `native_pairs`.

Which model is one of them stands in `config/exportable`. What a class computes otherwise than we do by default is set:
the norm's epsilon, Granite's multipliers, the window (which counts the token itself, as ours).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.interop.rules import Rules, TensorRule

Settings = dict[str, Any]


class Native(ABC):
    """One class of transformers. `together` of our sub-layers are one of its layers."""

    name: ClassVar[str]
    model_type: ClassVar[str]
    together: ClassVar[int] = 1

    @property
    def code(self) -> dict[str, bytes]:
        """Files that a folder must bring for it, by name."""
        return {}

    @abstractmethod
    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        """What config.json says beyond what all say."""

    @abstractmethod
    def rules(self, model: ModelConfig) -> list[TensorRule]: ...

    @abstractmethod
    def model(self, theirs: Settings) -> ModelConfig:
        """Our configuration of one of theirs. Raises ValueError where it has something that we do not."""

    def files(self) -> dict[str, bytes]:
        """Code that a folder brings for it, by the files' names; none where transformers has the class itself."""
        return {}

    def config(self, model: ModelConfig, length: int) -> Settings:
        """The whole of config.json but what concerns the tokenizer and the type of numbers."""
        common = {
            "architectures": [self.name],
            "model_type": self.model_type,
            "hidden_size": model.width,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
            "initializer_range": model.embedding_std,
            "use_cache": True,
        }
        return common | self.settings(model, architecture(model), length)


def checked(theirs: Settings, expected: Settings) -> None:
    """Settings that change what is computed must be what we compute."""
    for key, value in expected.items():
        if (found := theirs.get(key, value)) != value:
            raise ValueError(f"has {key}={found!r}; only {value!r} can be taken over")


def token_rules(rules: Rules, model: ModelConfig, embedding: str, norm: str) -> None:
    rules.add(embedding, "embedding.weight")
    rules.add(norm, "norm.weight")
    if not model.tie_embeddings:
        rules.add("lm_head.weight", "head.weight")


class NativeMamba(Native):
    """Mamba-1 alone."""

    name, model_type = "MambaForCausalLM", "mamba"

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        spec = arch.specs[0]
        assert isinstance(spec, MambaSpec)
        return {
            "state_size": spec.state,
            "num_hidden_layers": len(arch.specs),
            "expand": spec.expand,
            "intermediate_size": spec.inner(arch.sizes),
            "conv_kernel": spec.conv,
            "time_step_rank": spec.rank(arch.sizes),
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "layer_norm_epsilon": model.norm_eps,
            "residual_in_fp32": model.residual_fp32,
        }

    def rules(self, model: ModelConfig) -> list[TensorRule]:
        return backbone_rules(model)

    def model(self, theirs: Settings) -> ModelConfig:
        checked(theirs, {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"})
        spec = {
            "kind": "mamba",
            "state": theirs["state_size"],
            "expand": theirs["expand"],
            "conv": theirs["conv_kernel"],
            "dt_rank": theirs["time_step_rank"],
        }
        return ModelConfig(
            width=theirs["hidden_size"],
            vocab_size=theirs["vocab_size"],
            pattern=f"M*{theirs['num_hidden_layers']}",
            layers={"M": spec},
            tie_embeddings=theirs.get("tie_word_embeddings", True),
            norm_eps=theirs["layer_norm_epsilon"],
            residual_fp32=theirs.get("residual_in_fp32", True),  # as transformers takes it
        )


class NativeMamba2(Native):
    """Mamba-2 alone."""

    name, model_type = "Mamba2ForCausalLM", "mamba2"

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        spec = arch.specs[0]
        assert isinstance(spec, Mamba2Spec)
        return {
            "state_size": spec.state,
            "num_hidden_layers": len(arch.specs),
            "expand": spec.expand,
            "num_heads": spec.num_heads(arch.sizes),
            "head_dim": spec.head_dim,
            "n_groups": spec.groups,
            "conv_kernel": spec.conv,
            "chunk_size": 256,
            "use_bias": False,
            "use_conv_bias": True,
            "rms_norm": True,
            "hidden_act": "silu",
            "layer_norm_epsilon": model.norm_eps,
            "residual_in_fp32": model.residual_fp32,
        }

    def rules(self, model: ModelConfig) -> list[TensorRule]:
        return backbone_rules(model)

    def model(self, theirs: Settings) -> ModelConfig:
        checked(theirs, {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "rms_norm": True})
        if theirs["expand"] * theirs["hidden_size"] != theirs["num_heads"] * theirs["head_dim"]:
            raise ValueError("has num_heads x head_dim other than expand x hidden_size")
        spec = {
            "kind": "mamba2",
            "state": theirs["state_size"],
            "expand": theirs["expand"],
            "head_dim": theirs["head_dim"],
            "groups": theirs["n_groups"],
            "conv": theirs["conv_kernel"],
            "norm_eps": theirs["layer_norm_epsilon"],
        }
        return ModelConfig(
            width=theirs["hidden_size"],
            vocab_size=theirs["vocab_size"],
            pattern=f"M*{theirs['num_hidden_layers']}",
            layers={"M": spec},
            tie_embeddings=theirs.get("tie_word_embeddings", False),
            norm_eps=theirs["layer_norm_epsilon"],
            residual_fp32=theirs.get("residual_in_fp32", True),  # as transformers takes it
        )


def backbone_rules(model: ModelConfig) -> list[TensorRule]:
    """One mixer after another, each behind its norm, as both Mambas have them."""
    rules = Rules(model)
    token_rules(rules, model, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for index in range(len(architecture(model).specs)):
        rules.add(f"backbone.layers.{index}.norm.weight", f"layers.{index}.norm.weight")
        rules.add_mixer(f"backbone.layers.{index}.mixer", index)
    return rules.complete()
