"""Types for a phase: its data, its length, and its overrides.

`resolve.py` applies the overrides. A key that is left out keeps the value from the run's own section.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.config.choices import (
    DecaySchedule,
    Documents,
    Export,
    LrPiece,
    Moments,
    Order,
    Precision,
    Source,
    StateKind,
    StateMode,
)
from hybridtron.config.units import parse_tokens
from hybridtron.limits import above, at_least, not_empty, possible_path, readable_by

TOKENS = readable_by(parse_tokens)


@dataclass
class IngredientConfig:
    """One source of a mixture: its weight, and its location if not under its own name in `data.path`."""

    # proportion of rows from this source, relative to the other weights
    weight: Annotated[float, above(0, "weights need not add up to anything")] = MISSING
    path: Annotated[str | None, possible_path] = None  # another prepared folder; null: data.path
    source: str | None = None  # its name there; null: the name in the mixture


@dataclass
class PhaseDataConfig:
    """A phase's overrides of `data`; null: no override."""

    source: Source | None = None
    path: str | None = None
    mixture: dict[str, IngredientConfig] | None = (
        None  # overrides `data.mixture` in this phase; an explicit null removes it
    )
    documents: Documents | None = None
    order: Order | None = None
    epochs: float | None = None


@dataclass
class PhaseStatesConfig:
    """A phase's overrides of `states`; null: no override."""

    mode: StateMode | None = None
    carry: list[StateKind] | None = None
    layers: list[int] | None = None
    sigma: float | None = None
    beta: float | None = None
    dropout: float | None = None
    chunks: int | None = None
    through_time: bool | None = None


@dataclass
class PhaseOptimConfig:
    """A phase's overrides of `optim`; null: no override."""

    schedule: str | None = None
    hold: str | None = None
    warmup: str | None = None
    decay: str | None = None
    final_lr: float | None = None
    weight_decay: float | None = None
    weight_decay_schedule: DecaySchedule | None = None
    clip: float | None = None
    z_loss: float | None = None


@dataclass
class PhasePrecisionConfig:
    """A phase's overrides of `precision`; null: no override."""

    name: Precision | None = None
    emulate: bool | None = None
    bf16_first: int | None = None
    bf16_last: int | None = None
    history: int | None = None


@dataclass
class RampConfig:
    """Growth of the batch at a phase's start, from `start` rows by `step` rows at a time."""

    start: Annotated[int, at_least(1)] = MISSING  # rows of the first batches
    step: Annotated[int, at_least(1)] = MISSING  # rows by which the batch grows
    # length of the ramp: the batch sizes share these tokens evenly
    tokens: Annotated[str, TOKENS] = MISSING


@dataclass
class PhaseConfig:
    """One part of training: its length in tokens, its rows, its learning rate, and its overrides."""

    # appears in metrics and in the names of exports
    name: Annotated[str, not_empty("give the phase a name")] = "pretrain"
    tokens: Annotated[str, TOKENS] = MISSING  # length of the phase: 20B, 4M
    seq_len: Annotated[int, at_least(1)] = MISSING  # tokens of a row
    global_batch: Annotated[int, at_least(1)] = MISSING  # rows of an optimizer step
    micro_batch: Annotated[int, at_least(1)] = 1  # rows of one forward pass on one data-parallel rank
    ramp: RampConfig | None = None  # smaller batches at the start
    lr: Annotated[float | None, above(0)] = None  # the peak learning rate, for lr_piece=rewarm
    # rewarm: a new schedule; carry_on: the previous phase's schedule continues; decay: from its last rate to lr_to
    lr_piece: LrPiece = LrPiece.rewarm
    lr_to: Annotated[float | None, above(0)] = None  # the final learning rate of lr_piece=decay
    data: PhaseDataConfig = field(default_factory=PhaseDataConfig)
    states: PhaseStatesConfig = field(default_factory=PhaseStatesConfig)
    optim: PhaseOptimConfig = field(default_factory=PhaseOptimConfig)
    precision: PhasePrecisionConfig = field(default_factory=PhasePrecisionConfig)
    # options that override model.layers in this phase; null removes an option
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # patterns of the weights to train, such as layers.*.mixer.*; null: all, or with adapters those of their preset
    train: list[str] | None = None
    # low-rank adapters on frozen weights; null: those of model.adapters, which are none by default
    adapters: AdaptersConfig | None = None
    init_from: str | None = None  # checkpoint or run whose weights the phase starts from, as for run.weights
    moments: Moments = Moments.keep  # the optimizer's moments: keep those of the previous phase, or reset them
    # export the model at the end of the phase as a Hugging Face folder, RUN/export/NAME: with a class of transformers
    # (native), with our own class (custom), or with the former where one fits (auto)
    export: Export | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a global batch."""
        return self.seq_len * self.global_batch
