"""Native classes (model classes of transformers): translation between their config.json and our configuration.

In names here and in the files `native_*`, `ours` means hybridtron, and `theirs` means transformers. This file has the
base classes, and the classes for models with only Mamba-1 or only Mamba-2 layers (MambaForCausalLM, Mamba2ForCausalLM).
Classes with attention or MLPs are in the other `native_*` files. `config/export_class` decides whether a class computes
a given model exactly.

Settings such as the norm's epsilon have other defaults in transformers than here, so exports always write them.
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
from hybridtron.architecture.table import Architecture
from hybridtron.interop.rules import Rules, TensorRule

Settings = dict[str, Any]
# a minimum for Mamba-2's step size that has no effect; not 0, because transformers takes the logarithm of the minimum
NO_FLOOR = 1e-30
# prefix of tensor names -> description, for tensors that predict further tokens
MULTI_TOKEN: Mapping[str, str] = {"mtp.": "layers for multi-token prediction"}
MAX_EXPERTS = 2**17  # limit for the experts of all layers; the largest models have 512 in a hundred layers


class SubLayerNames(NamedTuple):
    """Names of a sub-layer's modules and weights in another format, relative to the layer's prefix.

    norm: the norm before the sub-layer
    mixer: the module after the norm: attention, Mamba, MLP, ...; "" if the weights are in several modules of the layer
    weights: this module's weights; None stands for the names that the spec's method `exported_names` returns
    """

    norm: str = "norm"
    mixer: str = "mixer"
    weights: Names | None = None


class Wrapper(NamedTuple):
    """A class of transformers with a language model and a vision model; imports read only the language model.

    The language model's own settings are in config.json under `text_config`.

    name: the class that config.json names
    model_type: the class's `model_type`
    """

    name: str
    model_type: str


class ModelFormat(ABC):
    """A model format other than ours: its tensor names, and how its config.json is translated.

    A layer in the format consists of one or several of our sub-layers (attention, Mamba, MLP, ...).
    """

    name: ClassVar[str]
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    head: ClassVar[str] = "lm_head.weight"  # if it is not tied to the embedding
    layers: ClassVar[str] = "model.layers"
    dropped: ClassVar[Mapping[str, str]] = {}  # start of tensor names that imports drop -> description of these tensors
    in_pairs: ClassVar[bool] = False  # True if each layer of a model with MLPs is a mixer followed by an MLP
    by_place: ClassVar[bool] = False  # True if config.json gives layers' kinds by periods, not by a list
    sub_layers: ClassVar[Mapping[str, SubLayerNames]] = {}  # sub-layer's kind -> names; other kinds: default names

    @abstractmethod
    def model(self, theirs: Settings) -> ModelConfig:
        """Translate config.json (`theirs`) to our configuration. Raises ValueError for a feature that we don't have."""

    def groups(self, arch: Architecture) -> list[range]:
        """Return, for each layer in the format, the indices of our sub-layers that form the layer."""
        if self.in_pairs and arch.specs[-1].kind in ("swiglu", "moe"):
            group_size = 2
        else:
            group_size = 1
        return [range(first, first + group_size) for first in range(0, len(arch.specs), group_size)]

    def names_of(self, arch: Architecture, index: int) -> SubLayerNames:
        """Return the format's names for one of our sub-layers."""
        return self.sub_layers.get(arch.specs[index].kind, SubLayerNames())

    def rules(self, arch: Architecture) -> list[TensorRule]:
        """Return the rules that convert all tensors of a model."""
        rules = Rules(arch)
        rules.add(self.embedding, "embedding.weight")
        rules.add(self.final_norm, "norm.weight")
        if not arch.model.tie_embeddings:
            rules.add(self.head, "head.weight")
        for number, group in enumerate(self.groups(arch)):
            for index in group:
                self.add_sub_layer(rules, arch, f"{self.layers}.{number}", index)
        return rules.complete()

    def named_rules(self, arch: Architecture, names: Collection[str]) -> list[TensorRule]:
        """Return the rules with the names in a folder, since some tensors can have one of two names."""
        return [rule.as_named(names) for rule in self.rules(arch)]

    def rules_for(self, arch: Architecture, names: Collection[str]) -> list[TensorRule]:
        """Return the rules for a folder with tensors of these names. The names can also show how tensors are fused."""
        return self.named_rules(arch, names)

    def add_sub_layer(self, rules: Rules, arch: Architecture, layer: str, index: int) -> None:
        """Add the rules for our sub-layer `index`. `layer` is the name of the format's layer that contains it."""
        norm, mixer, weights = self.names_of(arch, index)
        if arch.specs[index].has_norm:
            rules.add(f"{layer}.{norm}.weight", f"layers.{index}.norm.weight")
        rules.add_mixer(f"{layer}.{mixer}".rstrip("."), index, weights)


class Native(ModelFormat):
    """A model class of transformers, with methods that write its config.json and read it back."""

    model_type: ClassVar[str]
    wrapper: ClassVar[Wrapper | None] = None  # class of published folders that also contain a vision model
    norm_eps: ClassVar[str] = "rms_norm_eps"
    tied: ClassVar[bool] = False  # default of tie_word_embeddings
    proven_with: ClassVar[Settings] = {}  # entries to override in config.json when a proof loads the folder
    fixed: ClassVar[Settings] = {}  # settings with a single supported value, which exports write and imports require

    @abstractmethod
    def settings(self, arch: Architecture, length: int) -> Settings:
        """Return the entries in config.json that differ from class to class. `length` is the longest row in tokens."""

    @abstractmethod
    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        """Translate config.json to our layer pattern and the options for each letter in the pattern.

        Raises ValueError for a feature that we don't have.
        """

    def files(self) -> dict[str, bytes]:
        """Return file name -> content, for code files to ship with an export. Only the custom class has such files."""
        return {}

    def config(self, arch: Architecture, length: int) -> Settings:
        """Return the content of config.json, except token ids and dtype. `length` is the longest row in tokens."""
        model = arch.model
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
        return common | self.fixed | self.settings(arch, length)

    def model(self, theirs: Settings) -> ModelConfig:
        for key, value in self.fixed.items():
            if (stated := theirs.get(key, value)) != value:
                raise ValueError(f"has {key}={stated!r}; only {value!r} can be imported")
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
    """Raise ValueError if the layer types listed under `key` are not all among `known`."""
    if unknown := sorted(set(theirs[key]) - set(known)):
        raise ValueError(f"has {key} with {unknown[0]!r}; only {', '.join(known)} can be imported")


def require_few_experts(experts: int, layers: int) -> None:
    """Raise ValueError for more than MAX_EXPERTS experts, since each may need a tensor of its own."""
    if experts * layers > MAX_EXPERTS:
        raise ValueError(f"has {experts} experts in {layers} layers; at most {MAX_EXPERTS} in total can be imported")


def to_theirs(names: Mapping[str, str], options: Settings) -> Settings:
    """Rename a sub-layer's options to keys in config.json. `names` maps these keys to option names."""
    return {theirs: options[ours] for theirs, ours in names.items()}


def to_ours(names: Mapping[str, str], theirs: Settings) -> Settings:
    """Read a sub-layer's options from config.json. `names` maps keys in config.json to option names."""
    return {ours: theirs[key] for key, ours in names.items()}


def multipliers_of(arch: Architecture) -> Settings:
    """Return a model's multipliers by name.

    Granite's classes and the custom class have the same names in config.json.
    """
    return arch.multipliers


def with_multipliers(model: ModelConfig, theirs: Settings) -> ModelConfig:
    """Return the model with the multipliers from config.json; missing multipliers are 1."""
    return replace(model, **{name: theirs.get(name, 1.0) for name in MULTIPLIERS})


class NativeMamba(Native):
    """A model whose layers are all Mamba-1."""

    name = "MambaForCausalLM"
    model_type = "mamba"
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"
    layers = "backbone.layers"
    norm_eps = "layer_norm_epsilon"
    tied = True
    fixed: ClassVar = {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"}
    kind: ClassVar[str] = "mamba"
    options: ClassVar = {"state_size": "state", "expand": "expand", "conv_kernel": "conv", "time_step_rank": "dt_rank"}

    def settings(self, arch: Architecture, length: int) -> Settings:
        spec = arch.specs[0]
        assert isinstance(spec, MambaSpec | Mamba2Spec)
        return {
            **to_theirs(self.options, spec.exported_options(arch.sizes)),
            **self.derived(spec, arch),
            "num_hidden_layers": len(arch.specs),
            "residual_in_fp32": arch.model.residual_fp32,
        }

    def derived(self, spec: MambaSpec | Mamba2Spec, arch: Architecture) -> Settings:
        """Return the entries in config.json that are computed from several options."""
        return {"intermediate_size": spec.inner(arch.sizes)}

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return f"M*{theirs['num_hidden_layers']}", {"M": {"kind": self.kind, **to_ours(self.options, theirs)}}

    def model(self, theirs: Settings) -> ModelConfig:
        residual_fp32 = theirs.get("residual_in_fp32", True)  # the default in transformers
        return replace(super().model(theirs), residual_fp32=residual_fp32)


class NativeMamba2(NativeMamba):
    """A model whose layers are all Mamba-2."""

    name = "Mamba2ForCausalLM"
    model_type = "mamba2"
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
            raise ValueError("has num_heads x head_dim different from expand x hidden_size, which can't be imported")
        return super().pattern(theirs)
