"""Models that transformers knows by itself: which of ours they are, exactly, and how both are recognized.

Here what all classes share, with Mamba-1 and Mamba-2 alone (MambaForCausalLM, Mamba2ForCausalLM); those with MLPs stand
in `native_pairs`.

Which model is one of them stands in `config/exportable`. What a class computes otherwise than we do by default is set:
the norm's epsilon, the window (which counts the token itself, as ours).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from hybridtron.architecture.base import Names
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import MULTIPLIERS, ModelConfig
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.interop.rules import Rules, TensorRule

Settings = dict[str, Any]
NO_FLOOR = 1e-30  # of a step's size, which changes no state; transformers takes its logarithm, so it can't be 0


class SubLayerNames(NamedTuple):
    """What a layer of theirs calls our norm, our mixer, and its weights where these are not named as by the spec."""

    norm: str = "norm"
    mixer: str = "mixer"
    weights: Names | None = None


class ModelFormat(ABC):
    """How others name a model's weights, and what their config.json means in ours."""

    name: ClassVar[str]
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    layers: ClassVar[str] = "model.layers"
    in_pairs: ClassVar[bool] = False  # a mixer and the MLP after it, if there is one, are one layer
    sub_layers: ClassVar[Mapping[str, SubLayerNames]] = {}  # by kind, of those that are not named as ours

    @abstractmethod
    def model(self, theirs: Settings) -> ModelConfig:
        """Our configuration of one of theirs. Raises ValueError where it has something that we do not."""

    def groups(self, arch: Architecture) -> list[range]:
        """Our sub-layers that are one of its layers, for each of these."""
        together = 2 if self.in_pairs and arch.specs[-1].kind == "swiglu" else 1
        return [range(first, first + together) for first in range(0, len(arch.specs), together)]

    def names_of(self, arch: Architecture, index: int) -> SubLayerNames:
        """What its layer calls this sub-layer of ours."""
        return self.sub_layers.get(arch.specs[index].kind, SubLayerNames())

    def rules(self, model: ModelConfig) -> list[TensorRule]:
        rules, arch = Rules(model), architecture(model)
        rules.add(self.embedding, "embedding.weight")
        rules.add(self.final_norm, "norm.weight")
        if not model.tie_embeddings:
            rules.add("lm_head.weight", "head.weight")
        for number, group in enumerate(self.groups(arch)):
            for index in group:
                self.add_sub_layer(rules, arch, f"{self.layers}.{number}", index)
        return rules.complete()

    def add_sub_layer(self, rules: Rules, arch: Architecture, layer: str, index: int) -> None:
        """Its rules, where their layer of this name has it."""
        norm, mixer, weights = self.names_of(arch, index)
        if arch.specs[index].has_norm:
            rules.add(f"{layer}.{norm}.weight", f"layers.{index}.norm.weight")
        rules.add_mixer(f"{layer}.{mixer}", index, weights)


class Native(ModelFormat):
    """One class of transformers."""

    model_type: ClassVar[str]
    norm_eps: ClassVar[str] = "rms_norm_eps"
    tied: ClassVar[bool] = False  # where config.json does not say
    proven_with: ClassVar[Settings] = {}  # what the proof sets in their configuration, whatever a folder says
    fixed: ClassVar[Settings] = {}  # what changes what is computed: exports state it, and imports accept no other value

    @abstractmethod
    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        """What config.json says beyond what all say."""

    @abstractmethod
    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        """Our pattern and what its letters mean. Raises ValueError where it has something that we do not."""

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
            self.norm_eps: model.norm_eps,
        }
        return common | self.fixed | self.settings(model, architecture(model), length)

    def model(self, theirs: Settings) -> ModelConfig:
        for key, value in self.fixed.items():
            if (found := theirs.get(key, value)) != value:
                raise ValueError(f"has {key}={found!r}; only {value!r} can be imported")
        pattern, layers = self.pattern(theirs)
        return ModelConfig(
            width=theirs["hidden_size"],
            vocab_size=theirs["vocab_size"],
            pattern=pattern,
            layers=layers,
            tie_embeddings=theirs.get("tie_word_embeddings", self.tied),
            norm_eps=theirs[self.norm_eps],
        )


def require_known(theirs: Settings, key: str, known: Collection[str]) -> None:
    """ValueError where a list of types has one that we do not."""
    if unknown := sorted(set(theirs[key]) - set(known)):
        raise ValueError(f"has {key} with {unknown[0]!r}; only {', '.join(known)} can be imported")


def to_theirs(names: Mapping[str, str], options: Settings) -> Settings:
    """A spec's options under their names."""
    return {theirs: options[ours] for theirs, ours in names.items()}


def to_ours(names: Mapping[str, str], theirs: Settings) -> Settings:
    """The same options read from their settings."""
    return {ours: theirs[key] for key, ours in names.items()}


def multipliers_of(model: ModelConfig) -> Settings:
    """A model's multipliers, which Granite's classes and ours call as we do."""
    return {name: getattr(model, name) for name in MULTIPLIERS}


def with_multipliers(model: ModelConfig, theirs: Settings) -> ModelConfig:
    """A model with theirs; 1 where there is none."""
    return replace(model, **{name: theirs.get(name, 1.0) for name in MULTIPLIERS})


class NativeMamba(Native):
    """Mamba-1 alone."""

    name, model_type = "MambaForCausalLM", "mamba"
    embedding, final_norm, layers = "backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers"
    norm_eps, tied = "layer_norm_epsilon", True
    fixed: ClassVar = {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"}
    kind: ClassVar[str] = "mamba"
    options: ClassVar = {"state_size": "state", "expand": "expand", "conv_kernel": "conv", "time_step_rank": "dt_rank"}

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        spec = arch.specs[0]
        assert isinstance(spec, MambaSpec | Mamba2Spec)
        return {
            **to_theirs(self.options, spec.exported_options(arch.sizes)),
            **self.derived(spec, arch),
            "num_hidden_layers": len(arch.specs),
            "residual_in_fp32": model.residual_fp32,
        }

    def derived(self, spec: MambaSpec | Mamba2Spec, arch: Architecture) -> Settings:
        """What follows from the options."""
        return {"intermediate_size": spec.inner(arch.sizes)}

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return f"M*{theirs['num_hidden_layers']}", {"M": {"kind": self.kind, **to_ours(self.options, theirs)}}

    def model(self, theirs: Settings) -> ModelConfig:
        wide = theirs.get("residual_in_fp32", True)  # as transformers takes it
        return replace(super().model(theirs), residual_fp32=wide)


class NativeMamba2(NativeMamba):
    """Mamba-2 alone."""

    name, model_type = "Mamba2ForCausalLM", "mamba2"
    tied = False
    fixed: ClassVar = {**NativeMamba.fixed, "rms_norm": True}
    kind = "mamba2"
    options: ClassVar = {
        "state_size": "state",
        "expand": "expand",
        "head_dim": "head_dim",
        "n_groups": "groups",
        "conv_kernel": "conv",
        "layer_norm_epsilon": "norm_eps",
    }

    def derived(self, spec: MambaSpec | Mamba2Spec, arch: Architecture) -> Settings:
        assert isinstance(spec, Mamba2Spec)
        return {"num_heads": spec.num_heads(arch.sizes), "chunk_size": 256}

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        if theirs["expand"] * theirs["hidden_size"] != theirs["num_heads"] * theirs["head_dim"]:
            raise ValueError("has num_heads x head_dim other than expand x hidden_size")
        return super().pattern(theirs)
