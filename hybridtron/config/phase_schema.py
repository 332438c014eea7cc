"""A phase of a run as types: how much of what it trains on, and what it changes in the rest of the configuration.

`Config.in_phase` lays the changes over it. A key that is left out stays as the run's own section says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from hybridtron.config.choices import (
    DecaySchedule,
    Documents,
    Export,
    LrPiece,
    Moments,
    Order,
    Precision,
    Schedule,
    Source,
    StateKind,
    StateMode,
)


@dataclass
class IngredientConfig:
    """One source of a mixture: its weight, and where it is read, if not under its own name in `data.path`."""

    weight: float = MISSING
    path: str | None = None  # other prepared tokens
    source: str | None = None  # the name that it has there


@dataclass
class PhaseDataConfig:
    """What a phase changes in `data`; null leaves it as it is."""

    source: Source | None = None
    path: str | None = None
    mixture: dict[str, IngredientConfig] | None = None
    documents: Documents | None = None
    order: Order | None = None
    epochs: float | None = None


@dataclass
class PhaseStatesConfig:
    """What a phase changes in `states`; null leaves it as it is."""

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
    """What a phase changes in `optim`; null leaves it as it is."""

    schedule: Schedule | None = None
    warmup: str | None = None
    decay: str | None = None
    final_lr: float | None = None
    weight_decay: float | None = None
    weight_decay_schedule: DecaySchedule | None = None
    clip: float | None = None
    z_loss: float | None = None


@dataclass
class PhasePrecisionConfig:
    """What a phase changes in `precision`; null leaves it as it is."""

    name: Precision | None = None
    emulate: bool | None = None
    bf16_first: int | None = None
    bf16_last: int | None = None
    history: int | None = None


@dataclass
class RampConfig:
    """The batch of a phase's first tokens: from `start` rows on, `step` rows larger in equal shares of `tokens`."""

    start: int = MISSING
    step: int = MISSING
    tokens: str = MISSING


@dataclass
class PhaseConfig:
    """One stretch of training: so many tokens of this data, in rows of seq_len, at this learning rate."""

    name: str = "pretrain"
    tokens: str = MISSING
    seq_len: int = MISSING
    global_batch: int = MISSING  # rows in an optimizer step
    micro_batch: int = 1  # rows in one forward pass
    ramp: RampConfig | None = None  # smaller batches at the start
    lr: float | None = None  # the peak, of lr_piece=rewarm
    lr_piece: LrPiece = LrPiece.rewarm
    lr_to: float | None = None  # where lr_piece=decay ends
    data: PhaseDataConfig = field(default_factory=PhaseDataConfig)
    states: PhaseStatesConfig = field(default_factory=PhaseStatesConfig)
    optim: PhaseOptimConfig = field(default_factory=PhaseOptimConfig)
    precision: PhasePrecisionConfig = field(default_factory=PhasePrecisionConfig)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)  # laid over model.layers; null takes an option out
    train: list[str] | None = None  # names of the weights that learn, such as layers.*.mixer.*; null: all of them
    init_from: str | None = None  # a checkpoint, or a run's folder: the phase starts from its weights
    moments: Moments = Moments.keep  # of the optimizer, from the phase before
    export: Export | None = None  # the end of the phase as a Hugging Face folder, RUN/export/NAME

    @property
    def tokens_per_step(self) -> int:
        """Of a whole batch."""
        return self.seq_len * self.global_batch
