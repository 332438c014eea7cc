"""Builds one spec per residual sub-layer from the pattern, and the table of all weights.

The table is the single source for counts, initialisation, optimizer groups, precision and checkpoints. It has the name,
shape and treatment of every weight, independent of the layout.
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
from hybridtron.architecture.inits import Constant, Normal, OutputProjection, Projection
from hybridtron.architecture.model import ModelConfig, Start
from hybridtron.architecture.pattern import RESERVED, Pattern, PatternError, parse
from hybridtron.architecture.place import place_problems
from hybridtron.architecture.rope import FORMER
from hybridtron.limits import limit_problems
from hybridtron.problems import ConfigError, Problem, did_you_mean


@dataclass(frozen=True)
class Architecture:
    """The model's residual sub-layers in order, with their letters and specs, and the number of sub-layers in each
    stage.
    """

    letters: tuple[str, ...]
    specs: tuple[MixerSpec, ...]
    sizes: ModelSizes
    stages: tuple[int, ...]

    def sizes_at(self, index: int) -> ModelSizes:
        """Return the model's sizes for the mixer of one sub-layer."""
        return self.sizes.at(index, [spec.kind for spec in self.specs])

    def next_is_beside(self, index: int) -> bool:
        """Return True if the next sub-layer is a parallel branch that shares this one's input."""
        return index + 1 < len(self.specs) and self.specs[index + 1].beside

    def mixer_weights(self, index: int) -> dict[str, Parameter]:
        """Return one sub-layer's mixer weights by full name; shared weights have the same name in all sub-layers of a
        letter.
        """
        table = {}
        for key, weight in self.specs[index].parameters(self.sizes_at(index)).items():
            owner = self.owner(index, weight.shared)
            table[f"{owner.path}.mixer.{key}"] = replace(weight, owner=owner)
        return table

    def owner(self, index: int, shared: bool) -> LayerOwner | LetterOwner:
        """Return the owner of a mixer's weight: its sub-layer, or the letter if its sub-layers share the weight."""
        return LetterOwner(self.letters[index]) if shared else LayerOwner(index)

    def shared_names(self, letter: str) -> list[str]:
        """Return the names, inside the mixer, of weights that all sub-layers of a letter share."""
        weights = self.by_letter[letter].parameters(self.sizes)
        return [name for name, weight in weights.items() if weight.shared]

    @property
    def carries_embedding(self) -> bool:
        """True if any sub-layer reads the embedding in addition to the stream, so that stages must pass it along."""
        return any(spec.feeds_next for spec in self.specs)

    @property
    def inseparable(self) -> list[range]:
        """Runs of sub-layers that must be in one stage, in order.

        A feeder stays with the next sub-layer, which reads its output, and parallel branches stay together.
        """
        apart = [not (spec.feeds_next or self.next_is_beside(index)) for index, spec in enumerate(self.specs)]
        ends = [0, *(end for end, ends_here in enumerate(apart, 1) if ends_here)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    @property
    def reads_in(self) -> int:
        """Multiple at which a text can be split outside training with the same result as reading it at once."""
        return math.lcm(*(spec.reads_in for spec in self.specs))

    @property
    def by_letter(self) -> dict[str, MixerSpec]:
        """Spec of each letter in the pattern, ordered by first appearance."""
        return dict(zip(self.letters, self.specs, strict=True))


def architecture(model: ModelConfig, longest: int = sys.maxsize) -> Architecture:
    """Parse the model's pattern and letters. Raises ConfigError with all problems, for rows of up to `longest`
    tokens.
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
    if problems:
        raise ConfigError(problems)
    return Architecture(pattern.letters, tuple(specs[letter] for letter in pattern.letters), sizes, pattern.stages)


def _spec(where: str, options: dict[str, Any]) -> MixerSpec:
    """Build a letter's spec from its options. Raises ConfigError with its problems."""
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


def parameter_table(model: ModelConfig) -> dict[str, Parameter]:
    """Return every weight of the model by its full name, such as `layers.3.mixer.in_proj.weight`.

    Weights shared by all sub-layers of a letter appear once, such as `shared.S.mixer.q.weight`.
    """
    arch = architecture(model)
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
    return table | adapter_rows(table, model.adapters)


def weight_name(arch: Architecture, index: int, key: str) -> str:
    """Return the full name of a mixer weight in one sub-layer, given its key or a stored part's."""
    weights = arch.specs[index].parameters(arch.sizes_at(index))
    shared = any(key in (name, *weight.stored(name)) for name, weight in weights.items() if weight.shared)
    return f"{arch.owner(index, shared).path}.mixer.{key}"


def _as_lit_gpt(table: dict[str, Parameter], arch: Architecture) -> dict[str, Parameter]:
    """Replace the initialisation of projections by lit-gpt's.

    A block is counted for every sub-layer with a state other than a convolution's, except parallel branches.
    """
    width = arch.sizes.width
    states = [spec.state_parts(arch.sizes).values() for spec in arch.specs if not spec.beside]
    blocks = max(1, sum(any(part.kind != "conv" for part in parts) for parts in states))
    starts: dict[type, Normal] = {
        Projection: Normal((2 / (5 * width)) ** 0.5),
        OutputProjection: Normal(width**-0.5 / blocks),
    }
    return {name: replace(weight, init=starts.get(type(weight.init), weight.init)) for name, weight in table.items()}


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
    """Return the types of a schema's options; cached, because evaluating annotations is the slowest step here."""
    return typing.get_type_hints(schema)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a YAML value fits an option of this type: ints pass as floats, booleans only as booleans."""
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
    return f"have: {', '.join(names)}"
