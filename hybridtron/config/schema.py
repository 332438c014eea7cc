"""The configuration as types: every key of a recipe or the command line; those of phases are in `phase_schema.py`.

Hydra checks names and types against these classes; `check.py` checks what types cannot express. The comment at a field
is what `docs/keys.md` says about the key (`make reference`). Durations are written
in tokens with a unit (`20B`, `4M`); where a key also takes steps, a plain number means steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

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

LARGEST = 2**63 - 1  # that a signed integer of 64 bits holds, as random generators and numpy take it
INTERVAL = readable_by(partial(parse_steps, tokens_per_step=1))
A_SHARE = readable_by(partial(parse_share, whole=1), least=0)


@dataclass
class DataConfig:
    """What is read, in which order, and how documents share a row. `path` is a folder of prepared tokens or its URL."""

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
    # tokens that are shuffled together; data shards of about twice as many are in use at a time
    shuffle: Annotated[str, TOKENS] = "1B"
    feed: Feed = Feed.torch  # what makes batches from rows: torch, or an NVIDIA DALI pipeline
    workers: Annotated[int, at_least(0)] = 0  # processes that prefetch; 0: a thread does
    prefetch: Annotated[int, at_least(1)] = 2  # steps that each of them reads ahead
    # how often a phase may read a source; null: as often as its tokens take
    epochs: Annotated[float | None, above(0, "null for any number")] = 1.0
    cache: Annotated[str, possible_path] = "data/cache"  # the folder for shards from a URL, and for unpacked ones
    # bytes, e.g. 500GB; null: everything is kept
    cache_limit: Annotated[str | None, readable_by(parse_bytes)] = None
    # seconds that one attempt at a download may take; a large file gets as many for each MiB
    timeout: Annotated[float, above(0)] = 60.0
    retries: Annotated[int, at_least(0)] = 2  # further attempts at a download


@dataclass
class StatesConfig:
    """What a row's recurrent state starts from in training; validation always starts from zero."""

    # what rows start from: zero; random or fitted noise; the state that their lane ended in, of another text
    # (passing) or of the same document (tbtt)
    mode: StateMode = StateMode.zero
    carry: list[StateKind] | None = None  # state parts by kind; null: ssm, for tbtt all kinds
    layers: list[int] | None = None  # sub-layers by their index in the model; null: all that have such a state
    sigma: Annotated[float, at_least(0)] = 1.0  # standard deviation of mode=random
    # of mode=fitted: the share of the old mean and variance that each step keeps
    beta: Annotated[float, below_one("such as 0.1")] = 0.1
    # of mode=passing: the share of rows that start from zero nevertheless
    dropout: Annotated[float, below_one("such as 0.1")] = 0.1
    chunks: int = 1  # of mode=tbtt: chunks of seq_len tokens that each lane reads in one step
    through_time: bool = False  # of mode=tbtt with chunks: gradients flow back through all chunks of a step


@dataclass
class OptimConfig:
    """AdamW, the learning rate's shape over a phase, and gradient clipping."""

    name: Annotated[str, one_of(OPTIMIZERS)] = "adamw"  # the optimizer, a name in hybridtron/optimizers
    # AdamW's decay rates of the two moments
    betas: Annotated[list[float], below_one("such as 0.9 and 0.95")] = field(default_factory=lambda: [0.9, 0.95])
    eps: Annotated[float, above(0)] = 1e-8  # AdamW's epsilon
    # decoupled weight decay of matrices, convolutions, embedding and head
    weight_decay: Annotated[float, at_least(0)] = 0.1
    # constant, or lr: weight_decay times the learning rate's share of its peak
    weight_decay_schedule: DecaySchedule = DecaySchedule.constant
    decay_all: bool = False  # also decay norms, biases, A_log, D and dt_bias, as a plain AdamW would
    clip: Annotated[float, above(0)] = 1.0  # the largest norm of all gradients together
    # the learning rate after warm-up: cosine, linear, wsd (constant, then a linear decay), or constant
    schedule: Annotated[str, one_of(SHAPES)] = "cosine"
    hold: Annotated[str, A_SHARE] = "0"  # at a rate of 0 before the warm-up: tokens, or a share of the phase
    warmup: Annotated[str, A_SHARE] = "1%"  # tokens, or a share of the phase
    decay: Annotated[str, A_SHARE] = "20%"  # length of the decay of schedule=wsd: tokens, or a share of the phase
    # the learning rate at the end of the phase, as a fraction of the peak
    final_lr: Annotated[float, from_zero_to_one("a fraction of each phase's lr")] = 0.1
    z_loss: Annotated[float, at_least(0)] = 0.0  # weight of the squared log-normalizer in the loss
    # a step is refused if its log gradient norm is this many deviations above the usual; null: never
    spike: Annotated[float | None, above(0, "such as 6, or null")] = 6.0
    # steps refused in a row before the run rolls back to a checkpoint and skips their data
    skips: Annotated[int, at_least(1)] = 5


@dataclass
class ParallelConfig:
    """How model and rows are divided over ranks; as many as are left divide the data."""

    tensor: Annotated[int, at_least(1)] = 1  # ranks that divide the weights of every layer
    sequence: bool = False  # they also divide the tokens of the residual stream
    # under `sequence`, mixers gather the tokens that enter them again in the backward pass instead of keeping them
    regather: bool = False
    pipeline: Annotated[int, at_least(1)] = 1  # ranks that divide the layers
    virtual_pipeline: Annotated[int, at_least(1)] = 1  # stages of each of them, interleaved
    context: Annotated[int, at_least(1)] = 1  # ranks that divide the tokens of every row, for all layers alike
    distributed_optimizer: bool = True  # data-parallel ranks share the optimizer's state
    # what the backward pass computes again: nothing, the sub-layers that look along the sequence, or every layer
    recompute: Recompute = Recompute.none
    # sub-layers at the start of every stage whose activations wait in the host's memory for the backward pass
    offload: Annotated[int, at_least(0)] = 0
    transformer_engine: bool = False  # its linear layers instead of megatron-core's; needs a GPU
    # products add the gradients of their weights to the sum over a step's micro-batches as they make them
    gradient_accumulation_fusion: bool = False
    # reduce gradients during the backward pass; null: where there are several data-parallel ranks
    overlap_grad_reduce: bool | None = None
    # gather weights during the forward pass, which needs gradients reduced so and distributed_optimizer; null: where
    # that is so, and there are no virtual stages
    overlap_param_gather: bool | None = None

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The number of ranks in each dimension over which weights and states are cut."""
        return {"tensor": self.tensor}

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor * self.pipeline * self.context


@dataclass
class PrecisionConfig:
    """The precision of weights and activations."""

    # number format of weights and activations; fp8_*: the large projections multiply in FP8, all else is bf16
    name: Precision = Precision.fp32
    # what gradients are added up in, over micro-batches and ranks; bf16 halves their memory and traffic, and rounds
    gradients: KeptFormat = KeptFormat.fp32
    # what the optimizer's moments are kept in between steps; bf16 halves their memory, and rounds after each step
    moments: KeptFormat = KeptFormat.fp32
    # of fp8_*: weights are rounded once a step, not in every pass, and kept so: a byte for each entry, two by
    # Transformer Engine
    cache_weights: bool = False
    emulate: bool = False  # round as FP8 does, on any device, to study a recipe's numerics; slow
    # sub-layers at the start that stay in bf16 when the others multiply in FP8
    bf16_first: Annotated[int, at_least(0)] = 0
    bf16_last: Annotated[int, at_least(0)] = 0  # the same at the end
    # of fp8_delayed: steps whose largest values determine the next scale factors
    history: Annotated[int, at_least(1)] = 1024


@dataclass
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: Annotated[str, INTERVAL] = "1000"  # steps, or tokens with a unit
    asynchronous: bool = False  # write from copies while training continues
    keep: Annotated[int, at_least(1)] = 2  # number of the newest checkpoints that are kept
    # checkpoints at multiples of this are kept forever: steps, or tokens with a unit
    keep_every: Annotated[str | None, INTERVAL] = None
    keep_best: bool = False  # also keep the checkpoint with the lowest held-out loss
    # s3://BUCKET/PREFIX, where finished checkpoints are copied to
    mirror: Annotated[str | None, matching("s3://[^/]+/.+", "s3://BUCKET/PREFIX, or left out")] = None
    failures: Annotated[int, at_least(1)] = 3  # failed writes in a row after which training ends


@dataclass
class RunConfig:
    """One run: its folder, its seed, how far it goes, what it reports."""

    # the name of the run, and of its folder
    name: Annotated[str, not_empty("the run's folder is named after it")] = MISSING
    # the run's folder
    dir: Annotated[str, not_empty("name a folder, or leave it out for runs/NAME")] = "runs/${run.name}"
    seed: Annotated[int, at_least(0), at_most(LARGEST)] = 1234  # of weights, data order and noise
    # stop after this step of the run; null: when all phases are done
    max_steps: Annotated[int | None, at_least(1)] = None
    plan: bool = False  # print the phase table and exit
    # then the run saves and exits with code 75; SLURM's own limit is always respected
    max_minutes: Annotated[float | None, above(0)] = None
    # seconds in which a step, an evaluation or a checkpoint must end, or the run fails
    timeout: Annotated[float, at_least(1, "and longer than a step takes")] = 1800.0
    deterministic: bool = False  # the same bits again on the same layout and machine; slower
    resume: str = "auto"  # auto: from the newest valid checkpoint; never; or a checkpoint folder
    accept_data_changes: bool = False  # resume although the data or the way they are read changed
    # whose weights a new run starts from: a checkpoint, or a run's folder for the newest, RUN@best for the lowest
    # held-out loss
    weights: str | None = None
    # what a recipe is made to continue, in words: train and submit refuse it without run.weights; null: nothing
    tunes: str | None = None
    compile: bool = False  # compile the model with torch.compile
    log_every: Annotated[int, at_least(1)] = 10  # steps between log lines where there is no terminal
    eval_every: Annotated[str, INTERVAL] = "1000"  # steps, or tokens with a unit
    # held-out tokens of an evaluation at the training length; other lengths read the same number
    eval_tokens: Annotated[str, TOKENS] = "1M"
    # lengths of held-out rows, in multiples of the training length
    eval_lengths: Annotated[list[int], at_least(1)] = field(default_factory=lambda: [1, 2, 3, 4])
    # what is measured in training: samba, span, length, hax, all, or a YAML file of tasks, as for `hybridtron evaluate`
    evaluate: str | None = None
    evaluate_every: Annotated[str, INTERVAL] = "10000"  # steps, or tokens with a unit; also where a phase ends
    # samples of each task and length; null: as the suite or the file says
    evaluate_samples: Annotated[int | None, at_least(1)] = None
    sample_tokens: Annotated[int, at_least(0)] = 0  # tokens of text generated at the end
    sample_prompt: str = "The "  # how that text begins
    layer_norms: bool = False  # per-layer norms of parameters and gradients in the metrics
    profile: Annotated[list[int], at_least(1)] = field(default_factory=list)  # steps to trace, e.g. [10,11]
    wandb: str | None = None  # project name at Weights & Biases; null: not used


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
    phases: list[PhaseConfig] = MISSING  # the phases of the run, in order
