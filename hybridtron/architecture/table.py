"""Builds one spec per residual sub-layer from the layer pattern, and the table of all weights.

The pattern is a string such as `(M-W-)*6` whose letters stand for sub-layers. A letter's *spec* is a dataclass with the
options for the letter's mixer (`base.py`). The table has the name, shape and treatment of every weight in the full
model, independent of how ranks shard the weights. Parameter counts, initialisation, optimizer groups, precision and
checkpoints are derived from the table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hybridtron.architecture import SPECS
from hybridtron.architecture.adapters import adapter_rows
from hybridtron.architecture.base import (
    Cut,
    LayerOwner,
    LetterOwner,
    MixerSpec,
    ModelOwner,
    ModelSizes,
    Parameter,
    linear,
)
from hybridtron.architecture.inits import Constant, EachExpert, Init, Normal, OutputProjection, Projection
from hybridtron.architecture.model import MULTIPLIERS, ModelConfig, Start
from hybridtron.architecture.mup import MupConfig, resized, transfer_problems, transferred
from hybridtron.architecture.pattern import RESERVED, Pattern, PatternError, parse
from hybridtron.architecture.placement import place_problems
from hybridtron.architecture.rope import FORMER
from hybridtron.limits import limit_problems
from hybridtron.problems import ConfigError, Problem, did_you_mean


@dataclass(frozen=True)
class Architecture:
    """The model's residual sub-layers in order, with their letters and specs, and the table of weights.

    `stages` has the number of sub-layers in each pipeline stage. `base` is the base model of muP (`mup.py`), or None
    without muP. The architecture is made once from a model's options, and passed to all code that needs the sub-layers
    or the table.
    """

    model: ModelConfig
    letters: tuple[str, ...]
    specs: tuple[MixerSpec, ...]
    sizes: ModelSizes
    stages: tuple[int, ...]
    base: Architecture | None = None

    @functools.cached_property
    def table(self) -> Mapping[str, Parameter]:
        """Full name -> parameter for every weight in the model, such as `layers.3.mixer.in_proj.weight`."""
        return {**self.base_table, **adapter_rows(self.base_table, self.model.adapters)}

    @functools.cached_property
    def base_table(self) -> Mapping[str, Parameter]:
        """Full name -> parameter for every weight except adapters."""
        table = _base_table(self)
        if self.base is None:
            return table
        return transferred(table, self.base.base_table)

    @property
    def multipliers(self) -> dict[str, float]:
        """Key in MULTIPLIERS -> value; muP's factor is included in `logits_scaling`."""
        return {name: getattr(self.model, name) for name in MULTIPLIERS} | {"logits_scaling": self.logits_scaling}

    @property
    def logits_scaling(self) -> float:
        """Divisor of the logits: `model.logits_scaling`, times the growth of a tied head's inputs under muP."""
        if self.base is None or not self.model.tie_embeddings:
            return self.model.logits_scaling
        return self.model.logits_scaling * self.sizes.width / self.base.sizes.width

    def sizes_at(self, index: int) -> ModelSizes:
        """Return the model's sizes for the mixer in one sub-layer."""
        return self.sizes.at(index, [spec.kind for spec in self.specs])

    def next_is_beside(self, index: int) -> bool:
        """Return True if the next sub-layer is a parallel branch, which reads this sub-layer's normed input."""
        return index + 1 < len(self.specs) and self.specs[index + 1].beside

    def mixer_weights(self, index: int) -> dict[str, Parameter]:
        """Return full name -> parameter, for the weights in one sub-layer's mixer.

        A weight that all sub-layers of a letter share has the same full name in all these sub-layers.
        """
        table = {}
        for key, weight in self.specs[index].parameters(self.sizes_at(index)).items():
            owner = self.owner(index, weight.shared)
            table[f"{owner.path}.mixer.{key}"] = replace(weight, owner=owner)
        return table

    def owner(self, index: int, shared: bool) -> LayerOwner | LetterOwner:
        """Return a mixer weight's owner: its sub-layer, or its letter for a shared weight."""
        return LetterOwner(self.letters[index]) if shared else LayerOwner(index)

    def shared_names(self, letter: str) -> list[str]:
        """Return the names, inside the mixer, of the weights that all sub-layers of a letter share."""
        weights = self.by_letter[letter].parameters(self.sizes)
        return [name for name, weight in weights.items() if weight.shared]

    @property
    def carries_embedding(self) -> bool:
        """True if any sub-layer reads the token embedding. Each pipeline stage must then send it to the next stage."""
        return any(spec.feeds_next for spec in self.specs)

    @property
    def inseparable(self) -> list[range]:
        """Ranges of sub-layer indices, in order. The sub-layers in a range must be in one pipeline stage.

        Together the ranges cover all sub-layers. A sub-layer with `feeds_next` is in one range with the next sub-layer,
        which reads its output. A parallel branch is in one range with the previous sub-layer, whose normed input it
        reads.
        """
        apart = [not (spec.feeds_next or self.next_is_beside(index)) for index, spec in enumerate(self.specs)]
        ends = [0, *(end for end, ends_here in enumerate(apart, 1) if ends_here)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    @property
    def chunk_multiple(self) -> int:
        """Granularity, in tokens, for splitting a text outside training.

        A text that is split at multiples of this number gives the same result as the unsplit text.
        """
        return math.lcm(*(spec.chunk_multiple for spec in self.specs))

    @property
    def by_letter(self) -> dict[str, MixerSpec]:
        """Each pattern letter's spec, ordered by first appearance."""
        return dict(zip(self.letters, self.specs, strict=True))


def architecture(model: ModelConfig, longest: int = sys.maxsize) -> Architecture:
    """Return a model's architecture, after checking the model's options for sequences with at most `longest` tokens.

    Raises ConfigError with all problems found.
    """
    problems = list(limit_problems(model, "model"))
    specs: dict[str, MixerSpec] = {}
    for letter, options in model.layers.items():
        where = f"model.layers.{letter}"
        if len(letter) != 1 or letter.isspace() or letter in RESERVED:
            problems.append(
                Problem(
                    where,
                    "malformed",
                    f"is not a valid letter: use a single character other than a space or one of {RESERVED}",
                )
            )
        try:
            specs[letter] = _spec(where, dict(options))
        except ConfigError as error:
            problems += error.problems
    pattern = Pattern((), ())
    try:
        pattern = parse(model.pattern, model.layers)
    except PatternError as error:
        problems.append(Problem("model.pattern", "malformed", str(error)))
    sizes = ModelSizes(model.width, len(pattern.letters) or 1)
    for letter, spec in specs.items() if model.width >= 1 else ():
        problems += [problem.below(f"model.layers.{letter}") for problem in spec.problems(sizes, longest)]
    problems += place_problems(pattern, specs)
    base_width = model.mup.base_width
    if not problems and base_width is not None:
        for letter, spec in specs.items():
            unfit = transfer_problems(spec, sizes, base_width, longest)
            problems += [problem.below(f"model.layers.{letter}") for problem in unfit]
    if problems:
        raise ConfigError(problems)
    arch = Architecture(
        model=model,
        letters=pattern.letters,
        specs=tuple(specs[letter] for letter in pattern.letters),
        sizes=sizes,
        stages=pattern.stages,
    )
    if base_width is None:
        return arch
    return _with_mup(arch, base_width)


def _with_mup(arch: Architecture, base_width: int) -> Architecture:
    """Return the architecture with muP's base model, and with the options that muP changes."""
    share = Fraction(base_width, arch.sizes.width)
    sizes = replace(arch.sizes, width=base_width)
    base = replace(
        arch,
        model=replace(arch.model, width=base_width, mup=MupConfig(), adapters=None),
        specs=tuple(resized(spec, share) for spec in arch.specs),
        sizes=sizes,
    )
    pairs = zip(arch.specs, base.specs, strict=True)
    return replace(arch, specs=tuple(spec.with_mup(arch.sizes, small, sizes) for spec, small in pairs), base=base)


def _spec(where: str, options: dict[str, Any]) -> MixerSpec:
    """Build a letter's spec from its options. Raises ConfigError if an option is wrong.

    `where` is the options' key in the configuration, such as `model.layers.M`.
    """
    kind = options.pop("kind", None)
    if kind not in SPECS:
        if kind is None:
            fault = Problem(f"{where}.kind", "missing", f"must be set; {_known(SPECS)}")
        else:
            hint = did_you_mean(str(kind), SPECS)
            fault = Problem(f"{where}.kind", "unknown-name", f"is {kind!r}{hint}; {_known(SPECS)}")
        raise ConfigError([fault])
    try:
        options = SPECS[kind].renamed(options)
    except ValueError as error:
        raise ConfigError([Problem(f"{where}.{FORMER}", "conflict", str(error))]) from error
    if problems := _option_problems(SPECS[kind], kind, options, where):
        raise ConfigError(problems)
    spec = SPECS[kind](**options)
    if problems := list(limit_problems(spec, where)):
        raise ConfigError(problems)
    return spec


def _base_table(arch: Architecture) -> dict[str, Parameter]:
    """Return full name -> parameter, for every weight except adapters.

    Weights shared by all sub-layers with the same letter appear once, such as `shared.S.mixer.q.weight`.
    """
    model = arch.model
    width = model.width
    vocab = model.vocab_size
    norm = Parameter((width,), Constant(1.0), decay=False, sequence_partial=True)
    if model.init is Start.mamba:
        embedded = Normal(model.embedding_std)
    else:
        embedded = Projection(width**-0.5)
    embedding = Parameter((vocab, width), embedded, cuts=(Cut(0),), owner=ModelOwner("embedding"))
    table = {"embedding.weight": embedding}
    for index, spec in enumerate(arch.specs):
        if spec.has_norm:
            table[f"layers.{index}.norm.weight"] = replace(norm, owner=LayerOwner(index))
        table |= arch.mixer_weights(index)
    table["norm.weight"] = replace(norm, owner=ModelOwner("norm"))
    if not model.tie_embeddings:
        table["head.weight"] = replace(linear(vocab, width, fp8=False), owner=ModelOwner("head"))
    if model.init is not Start.mamba:
        table = _as_lit_gpt(table, arch)
    return table


def weight_name(arch: Architecture, index: int, key: str) -> str:
    """Return the full name of a mixer weight in one sub-layer.

    `key` names the weight, or a part that checkpoints store separately, inside the mixer.
    """
    weights = arch.specs[index].parameters(arch.sizes_at(index))
    shared = any(key in (name, *weight.stored(name)) for name, weight in weights.items() if weight.shared)
    return f"{arch.owner(index, shared).path}.mixer.{key}"


def _as_lit_gpt(table: dict[str, Parameter], arch: Architecture) -> dict[str, Parameter]:
    """Replace projections' initialisation by lit-gpt's initialisation, which depends on the model's number of blocks.

    A block in lit-gpt is a sequence mixer with its MLP. Here, a sub-layer counts as a block if it mixes tokens: its
    state has a part other than a convolution's last inputs. Parallel branches do not count.
    """
    width = arch.sizes.width
    states = [spec.state_parts(arch.sizes).values() for spec in arch.specs if not spec.beside]
    blocks = max(1, sum(any(part.kind != "conv" for part in parts) for parts in states))
    starts: dict[type, Normal] = {
        Projection: Normal((2 / (5 * width)) ** 0.5),
        OutputProjection: Normal(width**-0.5 / blocks),
    }

    def drawn(init: Init) -> Init:
        if isinstance(init, EachExpert):
            return EachExpert(starts.get(type(init.init), init.init))
        return starts.get(type(init), init)

    return {name: replace(weight, init=drawn(weight.init)) for name, weight in table.items()}


def _option_problems(schema: type, what: str, options: Mapping[str, Any], where: str) -> list[Problem]:
    hints = _hints(schema)
    names = [f.name for f in dataclasses.fields(schema)]
    problems = []
    for name, value in options.items():
        below = next((kind for kind in _alternatives(hints.get(name)) if dataclasses.is_dataclass(kind)), None)
        if name not in names:
            hint = did_you_mean(name, names)
            problems.append(
                Problem(f"{where}.{name}", "unknown-name", f"is not an option of {what}{hint}; {_known(names)}")
            )
        elif isinstance(below, type) and isinstance(value, Mapping):
            problems += _option_problems(below, name, value, f"{where}.{name}")
        elif not _fits(value, hints[name]):
            problems.append(
                Problem(f"{where}.{name}", "wrong-type", f"is {value!r}, must be {_type_name(hints[name])}")
            )
    return problems


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    """Return the types for a schema's options; cached, because evaluating annotations is slow."""
    return typing.get_type_hints(schema)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a YAML value fits an option with this type: ints pass as floats, booleans only as booleans."""
    for kind in _alternatives(hint):
        if isinstance(value, bool) and kind is not bool:
            continue
        if typing.get_origin(kind) is list:
            if isinstance(value, list) and all(_fits(item, *typing.get_args(kind)) for item in value):
                return True
            continue
        if isinstance(value, (int, float) if kind is float else kind):
            return True
    return False


def _type_name(hint: Any) -> str:
    return " or ".join(
        "null" if kind is types.NoneType else str(kind) if typing.get_origin(kind) else _plain_name(kind)
        for kind in _alternatives(hint)
    )


def _plain_name(kind: type) -> str:
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
    else:
        fields = ()
    if fields:
        return f"{{{', '.join(f'{f.name}: ...' for f in fields[:2])}}}"
    return kind.__name__


def _known(names: typing.Iterable[str]) -> str:
    return f"choose one of: {', '.join(names)}"
