"""Resolve a Config to its `RunPlan`: each phase's effective settings, as a `ResolvedPhase`, and the steps of the run.

A phase may change the model's letters, the data, the states, the optimizer's settings and the precision. `resolve`
applies these changes to the run's own sections, so that code that trains, counts or checks a phase reads one value and
need not know in which of the two places it was set. Only error messages need that: `ResolvedPhase.key`.

Steps count over the whole run. A phase covers the half-open range [start_step, end_step): `start_step` steps are done
when it begins, `end_step` when it ends, so its first step is the run's step number start_step + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from hybridtron.architecture import SPECS
from hybridtron.architecture.adapters import ADAPTERS, LEARNING_BESIDE
from hybridtron.architecture.base import Parameter
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import FORMER
from hybridtron.architecture.table import Architecture, architecture, parameter_table
from hybridtron.config.choices import Documents, Order, StateKind, StateMode
from hybridtron.config.growth import Growth
from hybridtron.config.phase_schema import (
    PhaseConfig,
    PhaseDataConfig,
    PhaseOptimConfig,
    PhasePrecisionConfig,
    PhaseStatesConfig,
)
from hybridtron.config.schema import Config, DataConfig, OptimConfig, PrecisionConfig, StatesConfig
from hybridtron.config.units import parse_tokens
from hybridtron.problems import ConfigError

NOISE = (StateMode.random, StateMode.fitted)
_SECTIONS = ("data", "states", "optim", "precision")  # a phase may change their keys, and also the model's letters


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase with all settings that hold while it trains.

    `settings` are the phase's own keys in the recipe (its name, lengths, rates). `config` is the run's configuration
    with the phase's model, optimizer and precision, as its checkpoints store it. `data` and `states` have the phase's
    overrides.
    """

    index: int
    settings: PhaseConfig
    config: Config
    data: DataConfig
    states: StatesConfig
    before: ResolvedPhase | None = field(repr=False)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def optim(self) -> OptimConfig:
        return self.config.optim

    @property
    def precision(self) -> PrecisionConfig:
        return self.config.precision

    @cached_property
    def arch(self) -> Architecture | None:
        """The model's architecture; None if the model is invalid, which the model's own rules report."""
        try:
            return architecture(self.model)
        except ConfigError:
            return None

    @cached_property
    def table(self) -> Mapping[str, Parameter]:
        """Every weight of the model by its name. Raises ConfigError if the model is invalid."""
        return parameter_table(self.model)

    @property
    def trained(self) -> Sequence[str] | None:
        """Name patterns for the trained weights; None for all.

        With adapters these are the adapters, the weights that their preset trains too, and `train`.
        """
        adapters = self.model.adapters
        named = self.settings.train
        if adapters is None:
            return named
        return [ADAPTERS, *LEARNING_BESIDE[adapters.preset], *(named or ())]

    def learns(self, name: str) -> bool:
        """Check if the phase trains this weight."""
        return self.trained is None or any(fnmatchcase(name, pattern) for pattern in self.trained)

    @property
    def keeps_adapters(self) -> bool:
        """True if the phase continues the previous phase's adapters.

        Otherwise it starts from weights with which those adapters have been merged.
        """
        if self.before is None:
            before = None
        else:
            before = self.before.model.adapters
        if self.model.adapters is None:
            return before is None
        return self.model.adapters.continues(before)

    @property
    def documents(self) -> Documents:
        """Document isolation, as set or as the phase's states need it.

        A carried or drawn state needs joined rows, since isolation would drop it at a row's first boundary.
        """
        joined = self.states.mode in (*NOISE, StateMode.passing)
        return self.data.documents or (Documents.join if joined else Documents.isolate)

    @property
    def order(self) -> Order:
        """The data's order, as set or as the phase's states need it."""
        return self.data.order or (Order.lanes if self.states.mode is StateMode.tbtt else Order.windows)

    @property
    def lanes(self) -> int:
        """Number of lanes, which are read in parallel; each reads `states.chunks` chunks (seq_len tokens) in a step."""
        return self.settings.global_batch // self.states.chunks

    @property
    def chunks_together(self) -> int:
        """Chunks per lane in one forward pass: all of a step if gradients flow through them, else 1."""
        if self.states.through_time:
            return self.states.chunks
        return 1

    @property
    def carried_kinds(self) -> list[StateKind]:
        """Kinds of states that are carried: as set, or all for tbtt, else only recurrent states."""
        if self.states.carry is not None:
            return self.states.carry
        if self.states.mode is StateMode.tbtt:
            return list(StateKind)
        return [StateKind.ssm]

    @cached_property
    def growth(self) -> Growth:
        return Growth.of(self.settings)

    @cached_property
    def start_step(self) -> int:
        """Steps that the run has done when the phase begins."""
        if self.before is None:
            return 0
        return self.before.end_step

    @cached_property
    def end_step(self) -> int:
        """Steps that the run has done when the phase ends; rounded up, so that the phase reads all its tokens."""
        rows = -(-parse_tokens(self.settings.tokens) // self.settings.seq_len)
        return self.start_step + self.growth.steps_for(rows)

    @cached_property
    def tokens_before(self) -> int:
        """Tokens that the run has read when the phase begins."""
        if self.before is None:
            return 0
        return self.before.tokens_before + self.before.tokens

    @property
    def tokens(self) -> int:
        """Tokens that the phase reads."""
        return self.phase_tokens_at(self.end_step)

    def tokens_at(self, step: int) -> int:
        """Return the tokens that the run has read after this step."""
        return self.tokens_before + self.phase_tokens_at(step)

    def phase_tokens_at(self, step: int) -> int:
        """Return the tokens that the phase has read after this step of the run."""
        return self.growth.rows_before(step - self.start_step) * self.settings.seq_len

    def tokens_of(self, step: int) -> int:
        """Return the tokens that this step of the run reads."""
        return self.growth.rows(step - self.start_step - 1) * self.settings.seq_len

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of a micro-batch on one rank; with context parallelism, those in its sequence shards."""
        return self.settings.seq_len * self.settings.micro_batch // self.config.parallel.context

    def own_key(self, name: str) -> str:
        """Return the key for one of the phase's own settings: `phases.1.seq_len`."""
        return f"phases.{self.index}.{name}"

    def key(self, key: str) -> str:
        """Return the key under which the user has set this phase's value: the phase's own where it changes the value.

        `optim.clip` is `phases.1.optim.clip` in a phase that sets it; `model.layers.W` is `phases.1.layers.W` in one
        that changes any option of W, and `model.layers.W.window` in one that changes that option.
        """
        section, _, name = key.partition(".")
        if section in _SECTIONS and getattr(getattr(self.settings, section), name.partition(".")[0], None) is not None:
            return self.own_key(key)
        if key.startswith("model.adapters") and self.settings.adapters is not None:
            return self.own_key(name)
        if key.startswith("model.layers."):
            letter, _, option = name.removeprefix("layers.").partition(".")
            changed = self.settings.layers.get(letter)
            if changed is not None and (not option or option.partition(".")[0] in changed):
                return self.own_key(f"layers.{letter}.{option}".rstrip("."))
        return key


def resolve(config: Config) -> tuple[ResolvedPhase, ...]:
    """Return a run's phases in order, also for a configuration that has not been checked yet."""
    phases: list[ResolvedPhase] = []
    for index, settings in enumerate(config.phases):
        letters = config.model.layers | {
            letter: _with(config.model.layers.get(letter, {}), changes) for letter, changes in settings.layers.items()
        }
        changed = dataclasses.replace(
            config,
            model=dataclasses.replace(
                config.model, layers=letters, adapters=settings.adapters or config.model.adapters
            ),
            optim=_overlaid(config.optim, settings.optim),
            precision=_overlaid(config.precision, settings.precision),
        )
        data = _overlaid(config.data, settings.data)
        states = _overlaid(config.states, settings.states)
        phases.append(ResolvedPhase(index, settings, changed, data, states, phases[-1] if phases else None))
    return tuple(phases)


@dataclass(frozen=True)
class RunPlan:
    """A run's configuration and the phases that follow from it: made once, in the command, and handed on."""

    config: Config
    phases: tuple[ResolvedPhase, ...]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Make the plan of a configuration."""
        return cls(config, resolve(config))

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @cached_property
    def last_step(self) -> int:
        """The step at which the run ends: after its phases, or at run.max_steps."""
        end = self.phases[-1].end_step
        limit = self.config.run.max_steps
        if limit is None:
            return end
        return min(end, limit)

    def phase_ending_at(self, step: int) -> ResolvedPhase:
        """Return the phase that a step of the run belongs to.

        Step 0, before any training, belongs to the first phase. Steps beyond the end, from a run that was longer,
        belong to the last.
        """
        return next((phase for phase in self.phases if step <= phase.end_step), self.phases[-1])

    def phase_continuing_at(self, step: int) -> ResolvedPhase:
        """Return the phase that the next step belongs to. The run must not have ended."""
        return next(phase for phase in self.phases if step < phase.end_step)


def last_step(config: Config) -> int:
    """Return the step at which a configuration's run ends, for callers without a plan."""
    return RunPlan.of(config).last_step


Base = TypeVar("Base", DataConfig, StatesConfig, OptimConfig, PrecisionConfig)
Changes = PhaseDataConfig | PhaseStatesConfig | PhaseOptimConfig | PhasePrecisionConfig


def _with(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a letter's options with a phase's changes. Options that hold options are merged recursively.

    A null removes an option, since another kind of layer may not have it.
    """
    removed = {name for name, value in changes.items() if value is None}
    removed |= {"rope"} if FORMER in removed else set()
    chosen = _as_named_now({k: v for k, v in changes.items() if v is not None}, options.get("kind"))
    before = _as_named_now(options, None)
    merged = {name: value for name, value in before.items() if name not in removed and value is not None}
    for name, value in chosen.items():
        old_value = merged.get(name)
        both_hold_options = isinstance(value, dict) and isinstance(old_value, dict)
        if both_hold_options:
            merged[name] = _with(old_value, value)
        else:
            merged[name] = value
    return merged


def _as_named_now(options: dict[str, Any], kind: object) -> dict[str, Any]:
    """Return options with former names replaced.

    Options that cannot be renamed stay, and the model's rules report them.
    """
    spec = SPECS.get(str(options.get("kind", kind)))
    with suppress(ValueError):
        if spec is None:
            return options
        return spec.renamed(options)
    return options


def _overlaid(base: Base, changes: Changes) -> Base:
    """Return `base` with the fields that `changes` sets."""
    chosen = {f.name: value for f in dataclasses.fields(changes) if (value := getattr(changes, f.name)) is not None}
    return dataclasses.replace(base, **chosen)
