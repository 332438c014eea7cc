"""Types for the phases of a run: their lengths, batches, learning rates and overrides.

An override is a phase's own value for a key in the run's sections `data`, `states`, `optim` or `precision`. A null
means no override, so the phase uses the run's value. `resolve.py` applies the overrides. The comment at a field is the
field's description in `docs/keys.md`.
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
from hybridtron.optimizers.muon import Coefficients, IterationFormat, Scale

TOKENS = readable_by(parse_tokens)


@dataclass
class IngredientConfig:
    """A source in a data mixture: its weight, and optionally its folder and its name there."""

    # proportion of rows from this source, relative to the other weights
    weight: Annotated[float, above(0, "weights need not sum to 1")] = MISSING
    path: Annotated[str | None, possible_path] = None  # prepared folder of the source; null: data.path
    source: str | None = None  # name of the source in that folder; null: the name in the mixture


@dataclass
class PhaseDataConfig:
    """A phase's overrides for `data`; null: no override."""

    source: Source | None = None
    path: str | None = None
    # overrides `data.mixture` in this phase; an explicit null removes the mixture
    mixture: dict[str, IngredientConfig] | None = None
    documents: Documents | None = None
    order: Order | None = None
    epochs: float | None = None


@dataclass
class PhaseStatesConfig:
    """A phase's overrides for `states`; null: no override."""

    mode: StateMode | None = None
    carry: list[StateKind] | None = None
    layers: list[int] | None = None
    sigma: float | None = None
    beta: float | None = None
    dropout: float | None = None
    chunks: int | None = None
    through_time: bool | None = None


@dataclass
class PhaseMuonConfig:
    """A phase's overrides for `optim.muon`; null: no override."""

    momentum: float | None = None
    nesterov: bool | None = None
    steps: int | None = None
    coefficients: Coefficients | None = None
    scale: Scale | None = None
    lr_factor: float | None = None
    iteration: IterationFormat | None = None
    heads: bool | None = None


@dataclass
class PhaseOptimConfig:
    """A phase's overrides for `optim`; null: no override."""

    # optimizer of the phase; null: optim.name; after a phase with another optimizer, the optimizer's state is zero
    name: str | None = None
    schedule: str | None = None
    hold: str | None = None
    warmup: str | None = None
    decay: str | None = None
    final_lr: float | None = None
    weight_decay: float | None = None
    weight_decay_schedule: DecaySchedule | None = None
    clip: float | None = None
    z_loss: float | None = None
    muon: PhaseMuonConfig = field(default_factory=PhaseMuonConfig)


@dataclass
class PhasePrecisionConfig:
    """A phase's overrides for `precision`; null: no override."""

    name: Precision | None = None
    emulate: bool | None = None
    bf16_first: int | None = None
    bf16_last: int | None = None
    history: int | None = None


@dataclass
class RampConfig:
    """Growth of the batch size at a phase's start, from `start` rows to `global_batch`, `step` rows at a time."""

    start: Annotated[int, at_least(1)] = MISSING  # rows of the first batches
    step: Annotated[int, at_least(1)] = MISSING  # rows by which the batch grows
    # length of the ramp in tokens, which are divided evenly among the batch sizes
    tokens: Annotated[str, TOKENS] = MISSING


@dataclass
class PhaseConfig:
    """A training phase: its length in tokens, its rows (sequences), its learning rate, and its overrides."""

    # name of the phase in metrics, and of its export folder
    name: Annotated[str, not_empty("give the phase a name")] = "pretrain"
    tokens: Annotated[str, TOKENS] = MISSING  # length of the phase in tokens, such as 20B or 4M
    seq_len: Annotated[int, at_least(1)] = MISSING  # tokens of a row
    global_batch: Annotated[int, at_least(1)] = MISSING  # rows of an optimizer step
    micro_batch: Annotated[int, at_least(1)] = 1  # rows of one forward pass on one data-parallel rank
    ramp: RampConfig | None = None  # smaller batches at the start of the phase; null: none
    lr: Annotated[float | None, above(0)] = None  # peak learning rate, for lr_piece=rewarm
    # rewarm: a new schedule; carry_on: continue the previous phase's schedule; decay: decay from the previous phase's
    # last rate to lr_to
    lr_piece: LrPiece = LrPiece.rewarm
    lr_to: Annotated[float | None, above(0)] = None  # final learning rate, for lr_piece=decay
    data: PhaseDataConfig = field(default_factory=PhaseDataConfig)
    states: PhaseStatesConfig = field(default_factory=PhaseStatesConfig)
    optim: PhaseOptimConfig = field(default_factory=PhaseOptimConfig)
    precision: PhasePrecisionConfig = field(default_factory=PhasePrecisionConfig)
    # options that override model.layers in this phase; null removes an option
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # name patterns of the weights to train, such as layers.*.mixer.*; null: all weights; a model with adapters trains
    # the adapters, the weights of their preset, and no other weights than those named here
    train: list[str] | None = None
    # low-rank adapters on frozen weights; null: model.adapters
    adapters: AdaptersConfig | None = None
    init_from: str | None = None  # checkpoint or run whose weights the phase starts from, named as in run.weights
    moments: Moments = Moments.keep  # the optimizer's moments; keep: the previous phase's moments; reset: zero
    # export the model to RUN/export/NAME at the end of the phase, in Hugging Face's format; native: uses a class of
    # transformers; custom: uses this package's class; auto: native if a class fits, else custom; null: no export
    export: Export | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch of `global_batch` rows."""
        return self.seq_len * self.global_batch
