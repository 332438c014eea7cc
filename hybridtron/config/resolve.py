"""Resolve a Config to a `RunPlan`: the effective settings of each phase (`ResolvedPhase`), and the run's steps.

A phase may change sub-layer options (`model.layers`), and keys in the sections `data`, `states`, `optim` and
`precision`. `resolve` applies these changes to the run's sections, so that other code reads only the effective values.
For error messages, `ResolvedPhase.key` returns the key that the user has set: the run's key, or the phase's own key.

Steps are counted over the full run, from 1. `start_step` counts the steps before a phase, and `end_step` counts the
steps up to the phase's end. So the phase has the steps `start_step + 1` to `end_step`.
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
from hybridtron.architecture.adapters import ADAPTERS, TRAINED_WITH_ADAPTERS
from hybridtron.architecture.base import Parameter
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import FORMER
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.batch_ramp import BatchRamp
from hybridtron.config.choices import Documents, Order, StateKind, StateMode
from hybridtron.config.phase_schema import (
    PhaseConfig,
    PhaseDataConfig,
    PhaseMuonConfig,
    PhaseOptimConfig,
    PhasePrecisionConfig,
    PhaseStatesConfig,
)
from hybridtron.config.schema import Config, DataConfig, OptimConfig, ParallelConfig, PrecisionConfig, StatesConfig
from hybridtron.config.units import parse_tokens
from hybridtron.optimizers.muon import MuonOptions
from hybridtron.problems import ConfigError

NOISE = (StateMode.random, StateMode.fitted)  # modes in which rows start from random states
_SECTIONS = ("data", "states", "optim", "precision")  # sections in which a phase may change keys


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase with its effective settings.

    index: the phase's index in `phases`, from 0
    settings: the phase's entry in `phases`, with its name, lengths, learning rates, overrides and so on
    config: the run's configuration with the phase's overrides for model, optim and precision; checkpoints store it
    data, states: the run's sections with the phase's overrides
    parsed: the architecture of the phase's model; None if the model is invalid, which `check` reports
    before: the previous phase; None for the first phase
    """

    index: int
    settings: PhaseConfig
    config: Config
    data: DataConfig
    states: StatesConfig
    parsed: Architecture | None = field(repr=False)
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

    @property
    def arch(self) -> Architecture:
        """The architecture of the phase's model, which must be valid."""
        assert self.parsed is not None
        return self.parsed

    @property
    def table(self) -> Mapping[str, Parameter]:
        """Name -> parameter, for every weight of the model. The model must be valid."""
        return self.arch.table

    def with_layout(self, parallel: ParallelConfig) -> ResolvedPhase:
        """Return the phase with another parallel layout."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, parallel=parallel))

    @property
    def trained(self) -> Sequence[str] | None:
        """Name patterns for the trained weights; None if all weights are trained.

        In a model with adapters, the patterns match three groups: the adapters, the other weights that the adapters'
        preset trains, and the weights in the phase's `train`.
        """
        adapters = self.model.adapters
        named = self.settings.train
        if adapters is None:
            return named
        return [ADAPTERS, *TRAINED_WITH_ADAPTERS[adapters.preset], *(named or ())]

    def learns(self, name: str) -> bool:
        """Return True if the phase trains the weight with this name."""
        if name in self.table and not self.table[name].trained:
            return False
        return self.trained is None or any(fnmatchcase(name, pattern) for pattern in self.trained)

    @property
    def keeps_adapters(self) -> bool:
        """True if the phase continues the previous phase's adapters, or neither phase has adapters.

        If False, the previous phase's adapters are merged into the weights before the phase starts.
        """
        if self.before is None:
            previous = None
        else:
            previous = self.before.model.adapters
        if self.model.adapters is None:
            return previous is None
        return self.model.adapters.continues(previous)

    @property
    def keeps_optimizer(self) -> bool:
        """True if the previous phase has the same optimizer, or if there is no previous phase.

        If False, the state of the previous phase's optimizer is discarded before the phase starts.
        """
        return self.before is None or self.before.optim.name == self.optim.name

    @property
    def documents(self) -> Documents:
        """Treatment of several documents in a row: `data.documents`, or a default if that key is null.

        The default is `join` if rows start from noise or from another document's state, else `isolate`. Isolation
        would reset the state to zero at each document boundary, so the initial state would affect only the first
        document.
        """
        joined = self.states.mode in (*NOISE, StateMode.passing)
        return self.data.documents or (Documents.join if joined else Documents.isolate)

    @property
    def order(self) -> Order:
        """Data order: `data.order`, or a default if that key is null.

        The default is `lanes` for `states.mode=tbtt`, else `windows`.
        """
        return self.data.order or (Order.lanes if self.states.mode is StateMode.tbtt else Order.windows)

    @property
    def lanes(self) -> int:
        """Lane count. A lane is one row position in the batch over all steps.

        In each step, a lane reads `states.chunks` consecutive chunks of seq_len tokens.
        """
        return self.settings.global_batch // self.states.chunks

    @property
    def chunks_together(self) -> int:
        """Number of a lane's chunks in one forward pass: `states.chunks` with `states.through_time`, else 1."""
        if self.states.through_time:
            return self.states.chunks
        return 1

    @property
    def carried_kinds(self) -> list[StateKind]:
        """State kinds that rows start with: `states.carry`, or a default if that key is null.

        The default is all kinds for `states.mode=tbtt`, else only `ssm`.
        """
        if self.states.carry is not None:
            return self.states.carry
        if self.states.mode is StateMode.tbtt:
            return list(StateKind)
        return [StateKind.ssm]

    @cached_property
    def batch_ramp(self) -> BatchRamp:
        return BatchRamp.of(self.settings)

    @cached_property
    def start_step(self) -> int:
        """The run's step count before the phase."""
        if self.before is None:
            return 0
        return self.before.end_step

    @cached_property
    def end_step(self) -> int:
        """The run's step count at the phase's end, rounded up: the phase reads at least `settings.tokens` tokens."""
        rows = -(-parse_tokens(self.settings.tokens) // self.settings.seq_len)
        return self.start_step + self.batch_ramp.steps_for(rows)

    @cached_property
    def tokens_before(self) -> int:
        """The run's token count before the phase."""
        if self.before is None:
            return 0
        return self.before.tokens_before + self.before.tokens

    @property
    def tokens(self) -> int:
        """The phase's token count."""
        return self.phase_tokens_at(self.end_step)

    def tokens_at(self, step: int) -> int:
        """Return how many tokens the run has read after this step of the run."""
        return self.tokens_before + self.phase_tokens_at(step)

    def phase_tokens_at(self, step: int) -> int:
        """Return how many tokens the phase has read after this step of the run."""
        return self.batch_ramp.rows_before(step - self.start_step) * self.settings.seq_len

    def tokens_of(self, step: int) -> int:
        """Return how many tokens this step of the run reads."""
        return self.batch_ramp.rows(step - self.start_step - 1) * self.settings.seq_len

    @property
    def tokens_of_rank(self) -> int:
        """A micro-batch's token count on one rank; context-parallel ranks divide the tokens."""
        return self.settings.seq_len * self.settings.micro_batch // self.config.parallel.context

    def own_key(self, name: str) -> str:
        """Return the dotted key for a field of this phase, such as `phases.1.seq_len` for `seq_len`."""
        return f"phases.{self.index}.{name}"

    def key(self, key: str) -> str:
        """Return the key under which the user has set the phase's value for `key`, a key in the run's sections.

        The result is `key` itself if the phase does not override the value, else the phase's own key. For example:

            optim.clip             ->  phases.1.optim.clip
            model.layers.W         ->  phases.1.layers.W, if the phase overrides any option of W
            model.layers.W.window  ->  phases.1.layers.W.window
        """
        section, _, name = key.partition(".")
        if section in _SECTIONS and _sets(getattr(self.settings, section), name):
            return self.own_key(key)
        if key.startswith("model.adapters") and self.settings.adapters is not None:
            return self.own_key(name)
        if key.startswith("model.layers."):
            letter, _, option = name.removeprefix("layers.").partition(".")
            changed = self.settings.layers.get(letter)
            if changed is not None and (not option or option.partition(".")[0] in changed):
                return self.own_key(f"layers.{letter}.{option}".rstrip("."))
        return key


def resolve(config: Config, known: Sequence[Architecture] = ()) -> tuple[ResolvedPhase, ...]:
    """Return a run's resolved phases, in order. The configuration need not have been checked.

    Phases with equal models share one architecture. An architecture in `known` is reused for a phase with its model.
    """
    phases: list[ResolvedPhase] = []
    architectures = list(known)
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
        parsed = _architecture_in(architectures, changed.model)
        if parsed is None:
            with suppress(ConfigError):  # `check` reports an invalid model
                parsed = architecture(changed.model)
                architectures.append(parsed)
        phases.append(
            ResolvedPhase(
                index=index,
                settings=settings,
                config=changed,
                data=data,
                states=states,
                parsed=parsed,
                before=phases[-1] if phases else None,
            )
        )
    return tuple(phases)


def _architecture_in(known: Sequence[Architecture], model: ModelConfig) -> Architecture | None:
    """Return the architecture in `known` with this model, or None."""
    return next((arch for arch in known if arch.model == model), None)


@dataclass(frozen=True)
class RunPlan:
    """A run's configuration and its resolved phases.

    `arch` is the architecture of the run's model, without the phases' overrides.
    """

    config: Config
    phases: tuple[ResolvedPhase, ...]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Build the plan for a configuration."""
        return cls(config, resolve(config))

    def with_layout(self, parallel: ParallelConfig, micro_batch: int | None = None) -> Self:
        """Return the plan with another parallel layout and, if given, another micro-batch size.

        Both plans share the same architectures.
        """
        settings = self.config.phases
        if micro_batch is not None:
            settings = [dataclasses.replace(phase, micro_batch=micro_batch) for phase in settings]
        config = dataclasses.replace(self.config, parallel=parallel, phases=settings)
        return type(self)(config, resolve(config, self._architectures))

    @cached_property
    def arch(self) -> Architecture:
        """The architecture of the run's model, without overrides. Raises ConfigError if the model is invalid."""
        return _architecture_in(self._architectures, self.config.model) or architecture(self.config.model)

    @property
    def _architectures(self) -> list[Architecture]:
        return [phase.parsed for phase in self.phases if phase.parsed is not None]

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @cached_property
    def last_step(self) -> int:
        """The run's last step: the last phase's end, or `run.max_steps` if that is smaller."""
        end = self.phases[-1].end_step
        limit = self.config.run.max_steps
        if limit is None:
            return end
        return min(end, limit)

    def phase_ending_at(self, step: int) -> ResolvedPhase:
        """Return the phase that contains a step of the run.

        Step 0, before training, belongs to the first phase. A step beyond the run's end belongs to the last phase: a
        checkpoint may come from a longer run.
        """
        return next((phase for phase in self.phases if step <= phase.end_step), self.phases[-1])

    def phase_continuing_at(self, step: int) -> ResolvedPhase:
        """Return the phase that contains the step after `step`. The run must not have ended."""
        return next(phase for phase in self.phases if step < phase.end_step)


Base = TypeVar("Base", DataConfig, StatesConfig, OptimConfig, PrecisionConfig, MuonOptions)
Changes = PhaseDataConfig | PhaseStatesConfig | PhaseOptimConfig | PhasePrecisionConfig | PhaseMuonConfig


def _with(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a letter in `model.layers` with a phase's changes.

    Options that are dictionaries are merged recursively. A change to null removes the option.
    """
    removed = {name for name, value in changes.items() if value is None}
    removed |= {"rope"} if FORMER in removed else set()
    chosen = _as_named_now({k: v for k, v in changes.items() if v is not None}, options.get("kind"))
    present = _as_named_now(options, None)
    merged = {name: value for name, value in present.items() if name not in removed and value is not None}
    for name, value in chosen.items():
        old_value = merged.get(name)
        both_hold_options = isinstance(value, dict) and isinstance(old_value, dict)
        if both_hold_options:
            merged[name] = _with(old_value, value)
        else:
            merged[name] = value
    return merged


def _as_named_now(options: dict[str, Any], kind: object) -> dict[str, Any]:
    """Return a letter's options after replacing former option names by the present names.

    `kind` is the mixer's kind, for options without a kind. Invalid options are returned unchanged; the model's check
    reports them.
    """
    spec = SPECS.get(str(options.get("kind", kind)))
    with suppress(ValueError):
        if spec is None:
            return options
        return spec.renamed(options)
    return options


def _overlaid(base: Base, changes: Changes) -> Base:
    """Return `base` with the fields that `changes` sets."""
    chosen: dict[str, Any] = {}
    for field_ in dataclasses.fields(changes):
        value = getattr(changes, field_.name)
        if isinstance(value, PhaseMuonConfig):
            chosen[field_.name] = _overlaid(getattr(base, field_.name), value)
        elif value is not None:
            chosen[field_.name] = value
    return dataclasses.replace(base, **chosen)


def _sets(changes: Changes, name: str) -> bool:
    """Return True if a phase's section overrides the key `name`. A key may have dots: `muon.momentum`."""
    first, _, rest = name.partition(".")
    value = getattr(changes, first, None)
    if isinstance(value, PhaseMuonConfig):
        return _sets(value, rest)
    return value is not None
