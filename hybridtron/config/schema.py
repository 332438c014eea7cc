"""Types for the configuration: every key of a recipe or the command line. Those for phases are in `phase_schema.py`.

Hydra checks names and types against these classes; `check.py` checks rules that types cannot express. The comment at a
field is its description in `docs/keys.md` (`make reference`). Durations are written in tokens with a unit (`20B`,
`4M`); where a key also takes steps, a plain number means steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from omegaconf import MISSING

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.choices import (
    DecaySchedule,
    Documents,
    Feed,
    KeptFormat,
    Order,
    Precision,
    Recompute,
    Source,
    StateKind,
    StateMode,
)
from hybridtron.config.cluster import ClusterConfig
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.config.phase_schema import TOKENS, IngredientConfig, PhaseConfig
from hybridtron.config.units import parse_bytes, parse_share, parse_steps
from hybridtron.limits import (
    above,
    at_least,
    at_most,
    below_one,
    from_zero_to_one,
    matching,
    not_empty,
    one_of,
    possible_path,
    readable_by,
)
from hybridtron.optimizers import OPTIMIZERS

LARGEST = 2**63 - 1  # the largest signed integer of 64 bits, the limit of random generators and numpy
INTERVAL = readable_by(partial(parse_steps, tokens_per_step=1))
A_SHARE = readable_by(partial(parse_share, whole=1), least=0)


@dataclass
class DataConfig:
    """Training data: its source, its order, and how documents share a row. `path` is a prepared folder or its URL."""

    # embedded: text that ships with Python, prepared on first use; folder: prepared tokens at path
    source: Source = Source.embedded
    path: Annotated[str, possible_path] = MISSING  # a prepared folder, or its URL
    # sources by weight; empty: every source of path, by its number of tokens
    mixture: dict[str, IngredientConfig] = field(default_factory=dict)
    # isolate: documents of a row do not see each other; join: a row is one stream; null: join where the states of the
    # phase are noise or passed, else isolate
    documents: Documents | None = None
    # windows: shuffled rows of packed text; lanes: each row position reads whole documents; null: lanes for
    # states.mode=tbtt, else windows
    order: Order | None = None
    # tokens that are shuffled together; data shards with about twice that number are in use at a time
    shuffle: Annotated[str, TOKENS] = "1B"
    feed: Feed = Feed.torch  # implementation that makes batches from rows: torch, or an NVIDIA DALI pipeline
    workers: Annotated[int, at_least(0)] = 0  # processes that prefetch; 0: a thread prefetches
    prefetch: Annotated[int, at_least(1)] = 2  # steps that each worker reads ahead
    # how many times a phase may read a source; null: as many as its tokens need
    epochs: Annotated[float | None, above(0, "null for any number")] = 1.0
    cache: Annotated[str, possible_path] = "data/cache"  # the folder for downloaded shards, and for unpacked ones
    # size limit of the cache in bytes, e.g. 500GB; null: everything is kept
    cache_limit: Annotated[str | None, readable_by(parse_bytes)] = None
    # time limit of one attempt at a download, in seconds; for large files it applies to each MiB
    timeout: Annotated[float, above(0)] = 60.0
    retries: Annotated[int, at_least(0)] = 2  # further attempts at a download


@dataclass
class StatesConfig:
    """Initial recurrent states of rows in training; validation always starts from zero."""

    # initial state of rows: zero; random or fitted noise; the last state of their lane, from another text (passing) or
    # from the same document (tbtt)
    mode: StateMode = StateMode.zero
    carry: list[StateKind] | None = None  # state parts by kind; null: ssm, for tbtt all kinds
    layers: list[int] | None = None  # sub-layers by their index in the model; null: all that have such a state
    sigma: Annotated[float, at_least(0)] = 1.0  # for mode=random: standard deviation of the noise
    # for mode=fitted: the fraction of the old mean and variance that each step keeps
    beta: Annotated[float, below_one("such as 0.1")] = 0.1
    # for mode=passing: the fraction of rows that start from zero nevertheless
    dropout: Annotated[float, below_one("such as 0.1")] = 0.1
    chunks: int = 1  # for mode=tbtt: chunks of seq_len tokens that each lane reads in one step
    through_time: bool = False  # for mode=tbtt with chunks: gradients flow back through all chunks of a step


@dataclass
class OptimConfig:
    """The optimizer, the shape of the learning rate over a phase, and gradient clipping."""

    name: Annotated[str, one_of(OPTIMIZERS)] = "adamw"  # the optimizer, a name in hybridtron/optimizers
    # AdamW's decay rates of the two moments
    betas: Annotated[list[float], below_one("such as 0.9 and 0.95")] = field(default_factory=lambda: [0.9, 0.95])
    eps: Annotated[float, above(0)] = 1e-8  # AdamW's epsilon
    # decoupled weight decay of matrices, convolutions, embedding and head
    weight_decay: Annotated[float, at_least(0)] = 0.1
    # constant, or lr: proportional to the learning rate, with weight_decay at its peak
    weight_decay_schedule: DecaySchedule = DecaySchedule.constant
    decay_all: bool = False  # also decay norms, biases, A_log, D and dt_bias, as a plain AdamW would
    clip: Annotated[float, above(0)] = 1.0  # maximum norm of all gradients together; larger gradients are scaled down
    # shape of the learning rate after warm-up; wsd is constant, then a linear decay
    schedule: Annotated[str, one_of(SHAPES)] = "cosine"
    hold: Annotated[str, A_SHARE] = "0"  # length at a rate of 0 before the warm-up: tokens, or a share of the phase
    warmup: Annotated[str, A_SHARE] = "1%"  # length of the warm-up: tokens, or a share of the phase
    decay: Annotated[str, A_SHARE] = "20%"  # length of the decay of schedule=wsd: tokens, or a share of the phase
    # the learning rate at the end of the phase, as a fraction of the peak
    final_lr: Annotated[float, from_zero_to_one("a fraction of each phase's lr")] = 0.1
    z_loss: Annotated[float, at_least(0)] = 0.0  # weight of the squared log-normalizer in the loss
    # a step is refused if its log gradient norm is this many standard deviations above the mean; null: never
    spike: Annotated[float | None, above(0, "such as 6, or null")] = 6.0
    # steps refused in a row before the run rolls back to a checkpoint and skips their data
    skips: Annotated[int, at_least(1)] = 5


@dataclass
class ParallelConfig:
    """The layout: how ranks divide the model and the rows. The remaining ranks are data parallel."""

    tensor: Annotated[int, at_least(1)] = 1  # ranks that divide the weights of every layer
    sequence: bool = False  # tensor-parallel ranks also divide the tokens of the residual stream
    # with `sequence`, mixers gather their input again in the backward pass instead of keeping it
    regather: bool = False
    pipeline: Annotated[int, at_least(1)] = 1  # ranks that divide the layers
    virtual_pipeline: Annotated[int, at_least(1)] = 1  # interleaved stages of each pipeline rank
    context: Annotated[int, at_least(1)] = 1  # ranks that divide the tokens of every row, for all layers alike
    distributed_optimizer: bool = True  # data-parallel ranks share the optimizer's state
    # sub-layers that the backward pass recomputes: none, those that mix tokens along the sequence, or all
    recompute: Recompute = Recompute.none
    # sub-layers at the start of every stage whose activations wait in the host's memory for the backward pass
    offload: Annotated[int, at_least(0)] = 0
    transformer_engine: bool = False  # its linear layers instead of megatron-core's; needs a GPU
    # products add weight gradients directly to the buffer that accumulates a step's micro-batches
    gradient_accumulation_fusion: bool = False
    # reduce gradients during the backward pass; null: if there are several data-parallel ranks
    overlap_grad_reduce: bool | None = None
    # gather weights during the forward pass, which needs overlap_grad_reduce and distributed_optimizer; null: if both
    # hold, and there are no virtual stages
    overlap_param_gather: bool | None = None

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Number of ranks in each mesh dimension that shards weights and states."""
        return {"tensor": self.tensor}

    @property
    def model_ranks(self) -> int:
        """Number of ranks that work together on the same rows."""
        return self.tensor * self.pipeline * self.context


@dataclass
class PrecisionConfig:
    """Precision of weights, activations, gradients and moments."""

    # number format of weights and activations; fp8_*: the large projections multiply in FP8, all else is bf16
    name: Precision = Precision.fp32
    # number format in which gradients are accumulated, over micro-batches and ranks; bf16 halves their memory and
    # traffic, and rounds
    gradients: KeptFormat = KeptFormat.fp32
    # number format of the optimizer's moments between steps; bf16 halves their memory, and rounds after each step
    moments: KeptFormat = KeptFormat.fp32
    # for fp8_*: round weights once a step instead of in every pass, and keep the rounded copy: one byte per entry, two
    # with Transformer Engine
    cache_weights: bool = False
    emulate: bool = False  # round as FP8 does, on any device, to study a recipe's numerics; slow
    # sub-layers at the start that stay in bf16 while the others multiply in FP8
    bf16_first: Annotated[int, at_least(0)] = 0
    bf16_last: Annotated[int, at_least(0)] = 0  # sub-layers at the end that stay in bf16
    # for fp8_delayed: number of past steps whose largest values determine the next scale factors
    history: Annotated[int, at_least(1)] = 1024


@dataclass
class CheckpointConfig:
    """Checkpoints: when they are written, and how many are kept."""

    every: Annotated[str, INTERVAL] = "1000"  # interval between checkpoints: steps, or tokens with a unit
    asynchronous: bool = False  # write from copies while training continues
    keep: Annotated[int, at_least(1)] = 2  # number of the newest checkpoints that are kept
    # checkpoints at multiples of this are kept forever: steps, or tokens with a unit
    keep_every: Annotated[str | None, INTERVAL] = None
    keep_best: bool = False  # also keep the checkpoint with the lowest held-out loss
    # s3://BUCKET/PREFIX to which finished checkpoints are copied; null: none
    mirror: Annotated[str | None, matching("s3://[^/]+/.+", "s3://BUCKET/PREFIX, or left out")] = None
    failures: Annotated[int, at_least(1)] = 3  # failed writes in a row after which training ends


@dataclass
class RunConfig:
    """One run: its folder, its seed, its limits and its reports."""

    # the name of the run, and of its folder
    name: Annotated[str, not_empty("the run's folder is named after it")] = MISSING
    # the run's folder
    dir: Annotated[str, not_empty("name a folder, or leave it out for runs/NAME")] = "runs/${run.name}"
    seed: Annotated[int, at_least(0), at_most(LARGEST)] = 1234  # seed of weights, data order and noise
    # stop after this step of the run; null: when all phases are done
    max_steps: Annotated[int | None, at_least(1)] = None
    plan: bool = False  # print the phase table and exit
    # time limit, after which the run saves and exits with code 75; SLURM's own limit is always respected; null: none
    max_minutes: Annotated[float | None, above(0)] = None
    # time limit in seconds for one step, evaluation, checkpoint or export; the run fails if one takes longer
    timeout: Annotated[float, at_least(1, "and longer than a step takes")] = 1800.0
    deterministic: bool = False  # bit-reproducible on the same layout and machine; slower
    resume: str = "auto"  # auto: from the newest valid checkpoint; never; or a checkpoint folder
    accept_data_changes: bool = False  # resume although the data or the way they are read changed
    # weights that a new run starts from: a checkpoint, or a run's folder for its newest one, or RUN@best for the one
    # with the lowest held-out loss
    weights: str | None = None
    # description of the weights that a recipe needs as its start: train and submit refuse it without run.weights; null:
    # it needs none
    tunes: str | None = None
    compile: bool = False  # compile the model with torch.compile
    log_every: Annotated[int, at_least(1)] = 10  # steps between log lines where there is no terminal
    eval_every: Annotated[str, INTERVAL] = "1000"  # interval between validations: steps, or tokens with a unit
    # held-out tokens of one validation at the training length; other lengths read the same number
    eval_tokens: Annotated[str, TOKENS] = "1M"
    # lengths of held-out rows, in multiples of the training length
    eval_lengths: Annotated[list[int], at_least(1)] = field(default_factory=lambda: [1, 2, 3, 4])
    # suite to evaluate in training: samba, span, length, hax, all, or a YAML file, as for `hybridtron evaluate`
    evaluate: str | None = None
    # interval between these evaluations: steps, or tokens with a unit; a phase's end has one too
    evaluate_every: Annotated[str, INTERVAL] = "10000"
    # samples of each task and length; null: as the suite or the file says
    evaluate_samples: Annotated[int | None, at_least(1)] = None
    sample_tokens: Annotated[int, at_least(0)] = 0  # tokens of text generated at the end
    sample_prompt: str = "The "  # how that text begins
    layer_norms: bool = False  # per-layer norms of parameters and gradients in the metrics
    profile: Annotated[list[int], at_least(1)] = field(default_factory=list)  # steps to trace, e.g. [10,11]
    wandb: str | None = None  # project name at Weights & Biases; null: not used
    # implementations of ops by the op's name, to search for a fault: {"*": reference} for all, which is very slow, or
    # {selective_scan: reference} (docs/debugging.md)
    force_ops: dict[str, str] = field(default_factory=dict)
    # refused steps whose batches are kept in the run's folder for `hybridtron replay`: the newest ones; 0: none
    keep_refused: Annotated[int, at_least(0)] = 8
    # your classes that run beside training (docs/extending.md): MODULE.CLASS, or {MODULE.CLASS: {OPTION: VALUE}}; not
    # read from configurations that runs have stored
    hooks: list[Any] = field(default_factory=list)


@dataclass
class Config:
    """The full configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunConfig = field(default_factory=RunConfig)
    phases: list[PhaseConfig] = MISSING  # the phases of the run, in order
