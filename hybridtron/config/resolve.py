"""What holds in each phase of a run: Config -> a tuple of `ResolvedPhase`, made once after loading.

A phase may change the model's letters, the data, the states, the optimizer's settings and the precision. Here its
changes are applied to the run's own sections, so that the code that trains, counts or checks a phase reads one value
and never asks which of the two places a setting came from. Only error messages ask that: `ResolvedPhase.key`.

Steps count over the whole run. A phase covers the half-open range [start_step, end_step): `start_step` steps are done
when it begins, `end_step` when it ends, so its first step is the run's step number start_step + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeVar

from hybridtron.architecture import SPECS
from hybridtron.architecture.adapters import ADAPTERS, LEARNING_BESIDE
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rope import FORMER
from hybridtron.architecture.table import Architecture, architecture
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
_SECTIONS = ("data", "states", "optim", "precision")  # of which a phase may change keys; letters of the model besides


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase with everything that holds while it trains.

    `settings` is what the recipe says of the phase itself (its name, lengths, rates). `config` is the run's
    configuration with the phase's model, optimizer and precision, as its checkpoints store it; what the phase reads and
    carries are `data` and `states`.
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
        """What the model is made of; None where something is wrong with it, which its own rules report."""
        try:
            return architecture(self.model)
        except ConfigError:
            return None

    @property
    def trained(self) -> Sequence[str] | None:
        """Names of the weights that learn, as patterns; None for all. Adapters learn, and what their preset names."""
        adapters, named = self.model.adapters, self.settings.train
        return named if adapters is None else [ADAPTERS, *LEARNING_BESIDE[adapters.preset], *(named or ())]

    def learns(self, name: str) -> bool:
        """Whether a weight is among those that the phase trains."""
        return self.trained is None or any(fnmatchcase(name, pattern) for pattern in self.trained)

    @property
    def keeps_adapters(self) -> bool:
        """Whether it has the adapters of the phase before; else it starts from weights with which those are merged."""
        before = None if self.before is None else self.before.model.adapters
        return before is None if self.model.adapters is None else self.model.adapters.continues(before)

    @property
    def documents(self) -> Documents:
        """As set. Else a carried or drawn state needs joined rows: it would be dropped at a row's first border."""
        joined = self.states.mode in (*NOISE, StateMode.passing)
        return self.data.documents or (Documents.join if joined else Documents.isolate)

    @property
    def order(self) -> Order:
        """As set, or as the phase's states need it."""
        return self.data.order or (Order.lanes if self.states.mode is StateMode.tbtt else Order.windows)

    @property
    def lanes(self) -> int:
        """Rows that are read side by side; each reads `states.chunks` chunks of seq_len in a step."""
        return self.settings.global_batch // self.states.chunks

    @property
    def chunks_together(self) -> int:
        """Chunks of a lane that one forward pass runs: all of a step where gradients flow through them, else 1."""
        return self.states.chunks if self.states.through_time else 1

    @property
    def carried_kinds(self) -> list[StateKind]:
        """The kinds of states that are carried: as set, or what the mode is about."""
        if self.states.carry is not None:
            return self.states.carry
        return list(StateKind) if self.states.mode is StateMode.tbtt else [StateKind.ssm]

    @cached_property
    def growth(self) -> Growth:
        return Growth.of(self.settings)

    @cached_property
    def start_step(self) -> int:
        """Steps of the run that are done when the phase begins."""
        return 0 if self.before is None else self.before.end_step

    @cached_property
    def end_step(self) -> int:
        """Steps of the run that are done when the phase ends: enough whole ones for its tokens."""
        rows = -(-parse_tokens(self.settings.tokens) // self.settings.seq_len)
        return self.start_step + self.growth.steps_for(rows)

    @cached_property
    def tokens_before(self) -> int:
        """Tokens that the run has read when the phase begins."""
        return 0 if self.before is None else self.before.tokens_before + self.before.tokens

    @property
    def tokens(self) -> int:
        """Tokens that the phase reads."""
        return self.phase_tokens_at(self.end_step)

    def tokens_at(self, step: int) -> int:
        """Tokens that the run has read after this step."""
        return self.tokens_before + self.phase_tokens_at(step)

    def phase_tokens_at(self, step: int) -> int:
        """Tokens that the phase has read after this step of the run."""
        return self.growth.rows_before(step - self.start_step) * self.settings.seq_len

    def tokens_of(self, step: int) -> int:
        """Tokens that this step of the run reads."""
        return self.growth.rows(step - self.start_step - 1) * self.settings.seq_len

    @property
    def tokens_of_rank(self) -> int:
        """Of a micro-batch's rows, where several ranks may share the tokens of a row."""
        return self.settings.seq_len * self.settings.micro_batch // self.config.parallel.context

    def own_key(self, name: str) -> str:
        """The key of one of the phase's own settings: `phases.1.seq_len`."""
        return f"phases.{self.index}.{name}"

    def key(self, key: str) -> str:
        """The key under which a person has set what holds in this phase: the phase's own where it changes it.

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
    """The phases of a run in order; also those of a configuration that is yet to be checked."""
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
        data, states = _overlaid(config.data, settings.data), _overlaid(config.states, settings.states)
        phases.append(ResolvedPhase(index, settings, changed, data, states, phases[-1] if phases else None))
    return tuple(phases)


def last_step(config: Config) -> int:
    """The step at which the run ends: after its phases, or at run.max_steps."""
    end = resolve(config)[-1].end_step
    return end if config.run.max_steps is None else min(end, config.run.max_steps)


def phase_ending_at(phases: Sequence[ResolvedPhase], step: int) -> ResolvedPhase:
    """The phase that a step of the run belongs to; step 0, at which nothing is trained, belongs to the first.

    One beyond the end, of a run that was longer, belongs to the last.
    """
    return next((phase for phase in phases if step <= phase.end_step), phases[-1])


def phase_continuing_at(phases: Sequence[ResolvedPhase], step: int) -> ResolvedPhase:
    """The phase that the next step belongs to, before the end of the run."""
    return next(phase for phase in phases if step < phase.end_step)


Base = TypeVar("Base", DataConfig, StatesConfig, OptimConfig, PrecisionConfig)
Changes = PhaseDataConfig | PhaseStatesConfig | PhaseOptimConfig | PhasePrecisionConfig


def _with(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A letter's options with the changed ones; null takes one out, as another kind of layer may not know it.

    Of an option that holds options, those are changed that the phase names.
    """
    gone = {name for name, value in changes.items() if value is None}
    gone |= {"rope"} if FORMER in gone else set()
    chosen = _as_named_now({k: v for k, v in changes.items() if v is not None}, options.get("kind"))
    before = _as_named_now(options, None)
    found = {name: value for name, value in before.items() if name not in gone and value is not None}
    for name, value in chosen.items():
        held = found.get(name)
        both = isinstance(value, dict) and isinstance(held, dict)
        found[name] = _with(held, value) if both else value
    return found


def _as_named_now(options: dict[str, Any], kind: object) -> dict[str, Any]:
    """Options without former names, as far as that can be said; what can't be, the rules of the model report."""
    spec = SPECS.get(str(options.get("kind", kind)))
    with suppress(ValueError):
        return options if spec is None else spec.renamed(options)
    return options


def _overlaid(base: Base, changes: Changes) -> Base:
    """`base` with the fields that `changes` sets."""
    chosen = {f.name: value for f in dataclasses.fields(changes) if (value := getattr(changes, f.name)) is not None}
    return dataclasses.replace(base, **chosen)
