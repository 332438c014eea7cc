"""The configuration as types. Every key that a recipe or the command line can set stands here, or in `phase_schema.py`.

Hydra checks names and types against these classes; `check.py` checks what the types can't say. Durations are written
in tokens with a unit (`20B`, `4M`); where a key also takes steps, a plain number means steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import MISSING

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.choices import (
    DecaySchedule,
    Documents,
    Feed,
    Order,
    Precision,
    Recompute,
    Schedule,
    Source,
    StateKind,
    StateMode,
)
from hybridtron.config.cluster import ClusterConfig
from hybridtron.config.phase_schema import (
    IngredientConfig,
    PhaseConfig,
    PhaseDataConfig,
    PhaseOptimConfig,
    PhasePrecisionConfig,
    PhaseStatesConfig,
)


@dataclass
class DataConfig:
    """What is read, in which order, and how documents share a row. `path` is a folder of prepared tokens or its URL."""

    source: Source = Source.embedded
    path: str = MISSING
    mixture: dict[str, IngredientConfig] = field(default_factory=dict)  # empty: every source of path, by its tokens
    documents: Documents | None = None  # null: join where a passed state or noise would die at a row's first border
    order: Order | None = None  # null: lanes for states.mode=tbtt, else windows
    shuffle: str = "1B"  # tokens shuffled among each other; shards of about two such stretches are in use at a time
    feed: Feed = Feed.torch
    workers: int = 0  # processes that read ahead; with 0 a thread does
    prefetch: int = 2  # steps that each of them reads ahead
    epochs: float | None = 1.0  # how often a phase may read a source; null: as often as its tokens take
    cache: str = "data/cache"  # where shards from a URL, and compressed ones, are kept
    cache_limit: str | None = None  # bytes, e.g. 500GB; null keeps everything
    timeout: float = 60.0  # seconds that one attempt at a download may take; a large file gets one for each MiB
    retries: int = 2  # further attempts


@dataclass
class StatesConfig:
    """What a row's recurrent state starts from in training; validation always starts from zero."""

    mode: StateMode = StateMode.zero
    carry: list[StateKind] | None = None  # null: ssm; for tbtt everything
    layers: list[int] | None = None  # sub-layers by their index in the model; null: all that have such a state
    sigma: float = 1.0  # of random
    beta: float = 0.1  # of fitted: the share of the old mean and variance that is kept in each step
    dropout: float = 0.1  # of passing: the share of rows that start from zero all the same
    chunks: int = 1  # of tbtt: chunks of seq_len that each lane reads in one step
    through_time: bool = False  # of tbtt with chunks: gradients flow back through all chunks of a step


@dataclass
class OptimConfig:
    """AdamW, the learning rate's shape over a phase, and gradient clipping."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    weight_decay_schedule: DecaySchedule = DecaySchedule.constant
    decay_all: bool = False  # also norms, biases, A_log, D and dt_bias, as a plain AdamW would
    clip: float = 1.0
    schedule: Schedule = Schedule.cosine
    warmup: str = "1%"  # tokens, or a share of the phase
    decay: str = "20%"  # WSD's last stretch, tokens or a share of the phase
    final_lr: float = 0.1  # as a fraction of the peak
    z_loss: float = 0.0
    spike: float | None = 6.0  # deviations above the usual log gradient norm from which a step is refused; null: never
    skips: int = 5  # steps refused in a row, after which the run goes back to a checkpoint and leaves their data out


@dataclass
class ParallelConfig:
    """How the model is laid out over ranks; data parallelism is what is left."""

    tensor: int = 1  # ranks that share the weights of every layer
    sequence: bool = False  # they also share the tokens between the layers' projections
    pipeline: int = 1  # ranks that share the layers
    virtual_pipeline: int = 1  # stages of each of them, interleaved
    context: int = 1
    expert: int = 1
    distributed_optimizer: bool = True  # data-parallel ranks share the optimizer's state
    recompute: Recompute = Recompute.none
    transformer_engine: bool = False  # its linear layers in the place of megatron-core's; needs a GPU
    overlap_grad_reduce: bool = False  # with the backward pass
    overlap_param_gather: bool = False  # with the forward pass; needs overlap_grad_reduce


@dataclass
class PrecisionConfig:
    """The precision of weights and activations."""

    name: Precision = Precision.fp32
    emulate: bool = False  # FP8's rounding on any device, to try a recipe's numerics; not its speed
    bf16_first: int = 0  # sub-layers at the start that stay in bf16 when the others multiply in FP8
    bf16_last: int = 0  # and at the end
    history: int = 1024  # of fp8_delayed: steps whose greatest values scale the next one


@dataclass
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: str = "1000"  # steps, or tokens with a unit
    asynchronous: bool = False  # written from copies while training goes on; on the command line checkpoint.async
    keep: int = 2  # the newest
    keep_every: str | None = None  # for ever those of every so many steps, or tokens with a unit
    keep_best: bool = False  # the one with the lowest held-out loss
    mirror: str | None = None  # s3://BUCKET/PREFIX, where finished checkpoints are copied to
    failures: int = 3  # checkpoints in a row that can't be written, after which training ends


@dataclass
class RunConfig:
    """One run: its folder, its seed, how far it goes, what it reports."""

    name: str = MISSING
    dir: str = "runs/${run.name}"
    seed: int = 1234
    max_steps: int | None = None
    plan: bool = False  # print the phases and end
    max_minutes: float | None = None  # then it saves and exits with code 75; SLURM's own limit is obeyed anyway
    timeout: float = 1800.0  # seconds in which a step, an evaluation or a checkpoint must end, or the run fails
    deterministic: bool = False  # the same bits again on the same layout and machine; slower
    resume: str = "auto"  # auto, never, or a checkpoint folder
    accept_data_changes: bool = False  # go on from a checkpoint though data or its reading are no longer the same
    weights: str | None = None  # a checkpoint, or a run's folder: a run that starts anew takes its weights from there
    compile: bool = False
    log_every: int = 10  # steps between console lines where there is no terminal
    eval_every: str = "1000"  # steps, or tokens with a unit
    eval_tokens: str = "1M"  # held-out tokens read at the training length; longer lengths read as many
    eval_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4])  # in multiples of the training length
    sample_tokens: int = 0  # tokens of text generated at the end
    sample_prompt: str = "The "
    layer_norms: bool = False  # per-layer parameter and gradient norms in the metrics
    profile: list[int] = field(default_factory=list)  # steps to trace, e.g. [10,11]
    wandb: str | None = None  # project name


@dataclass
class Config:
    """Everything a run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunConfig = field(default_factory=RunConfig)
    phases: list[PhaseConfig] = MISSING

    def in_phase(self, phase: PhaseConfig) -> Config:
        """With the model, the optimizer's settings and the precision as they are in a phase."""
        letters = self.model.layers | {
            letter: _with(self.model.layers.get(letter, {}), changes) for letter, changes in phase.layers.items()
        }
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, layers=letters),
            optim=_overlaid(self.optim, phase.optim),
            precision=_overlaid(self.precision, phase.precision),
        )

    def data_of(self, phase: PhaseConfig) -> DataConfig:
        return _overlaid(self.data, phase.data)

    def states_of(self, phase: PhaseConfig) -> StatesConfig:
        return _overlaid(self.states, phase.states)

    def documents_of(self, phase: PhaseConfig) -> Documents:
        """As set, or as the phase's states need it."""
        joined = self.states_of(phase).mode in (StateMode.random, StateMode.fitted, StateMode.passing)
        return self.data_of(phase).documents or (Documents.join if joined else Documents.isolate)

    def order_of(self, phase: PhaseConfig) -> Order:
        """As set, or as the phase's states need it."""
        walking = self.states_of(phase).mode is StateMode.tbtt
        return self.data_of(phase).order or (Order.lanes if walking else Order.windows)

    def lanes_of(self, phase: PhaseConfig) -> int:
        """Rows that are read side by side; each reads one chunk of seq_len after another in a step."""
        return phase.global_batch // self.states_of(phase).chunks

    def chunks_together(self, phase: PhaseConfig) -> int:
        """Chunks of a lane that one forward pass runs, one after another: all of a step through time, else one."""
        states = self.states_of(phase)
        return states.chunks if states.through_time else 1


Base = TypeVar("Base", DataConfig, StatesConfig, OptimConfig, PrecisionConfig)
Changes = PhaseDataConfig | PhaseStatesConfig | PhaseOptimConfig | PhasePrecisionConfig


def _with(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A letter's options with the changed ones; null takes one out, as another kind of layer may not know it."""
    return {name: value for name, value in (options | changes).items() if changes.get(name, value) is not None}


def _overlaid(base: Base, changes: Changes) -> Base:
    """`base` with the fields that `changes` sets."""
    chosen = {f.name: value for f in dataclasses.fields(changes) if (value := getattr(changes, f.name)) is not None}
    return dataclasses.replace(base, **chosen)
