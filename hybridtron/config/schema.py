"""Types for the configuration: sections and keys that a recipe or the command line can set.

Keys for phases are in `phase_schema.py`, and keys for `cluster` in `cluster.py`. Hydra checks names and types against
these classes; `check.py` checks rules that types cannot express. The comment at a field is the field's description in
`docs/keys.md`, which `make reference` writes. Durations are token counts with a unit, such as `20B` or `4M`. Some
durations can also be step counts, without a unit.

A row is one sequence in the batch. A lane is one row position in the batch over all steps.
"""

from __future__ import annotations

import math
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
from hybridtron.optimizers.muon import MuonOptions

LARGEST = 2**63 - 1  # largest signed 64-bit integer, the limit of random generators and numpy
INTERVAL = readable_by(partial(parse_steps, tokens_per_step=1))
A_SHARE = readable_by(partial(parse_share, whole=1), least=0)


@dataclass
class DataConfig:
    """Training data: source, order, and treatment of documents in a row."""

    # embedded: text that ships with Python, prepared at first use; folder: prepared tokens in data.path
    source: Source = Source.embedded
    path: Annotated[str, possible_path] = MISSING  # a prepared folder, or its URL
    # sources with weights; empty: every source in data.path, weighted by its number of tokens
    mixture: dict[str, IngredientConfig] = field(default_factory=dict)
    # isolate: documents in a row do not affect each other; join: a row is read as one text; null: join if states.mode
    # is random, fitted or passing, else isolate
    documents: Documents | None = None
    # windows: shuffled rows of packed documents; lanes: each lane reads complete documents, one after another; null:
    # lanes for states.mode=tbtt, else windows
    order: Order | None = None
    # number of tokens that are shuffled together; the data shards in use hold about twice this number of tokens
    shuffle: Annotated[str, TOKENS] = "1B"
    # implementation that builds batches from token ids: torch, or dali for an NVIDIA DALI pipeline
    feed: Feed = Feed.torch
    workers: Annotated[int, at_least(0)] = 0  # processes that prefetch batches; 0: a thread prefetches
    prefetch: Annotated[int, at_least(1)] = 2  # steps that each worker prefetches
    # maximum number of times that a phase reads a source; null: no limit
    epochs: Annotated[float | None, above(0, "null for any number")] = 1.0
    cache: Annotated[str, possible_path] = "data/cache"  # folder for downloaded and decompressed shards
    # size limit of the cache in bytes, such as 500GB; null: no limit
    cache_limit: Annotated[str | None, readable_by(parse_bytes)] = None
    # time limit in seconds of one attempt to download a file; a file with more MiB than this number gets one second
    # per MiB
    timeout: Annotated[float, above(0)] = 60.0
    retries: Annotated[int, at_least(0)] = 2  # further attempts after a failed download


@dataclass
class StatesConfig:
    """Initial states of rows in training. In validation, rows always start from zero states."""

    # initial state of rows. zero: zeros; random, fitted: noise; passing: the final state of the lane's previous row,
    # which is from another document; tbtt: the final state of the lane's previous row, which is from the same document
    mode: StateMode = StateMode.zero
    # kinds of state that rows start with: ssm, conv, kv; null: all kinds for mode=tbtt, else ssm
    carry: list[StateKind] | None = None
    # indices of the sub-layers whose initial states are set by mode; null: all sub-layers that have states
    layers: list[int] | None = None
    sigma: Annotated[float, at_least(0)] = 1.0  # for mode=random: standard deviation of the noise
    # for mode=fitted: decay of moving averages of the final states' mean and variance; each step multiplies the old
    # averages by this value
    beta: Annotated[float, below_one("such as 0.1")] = 0.1
    # for mode=passing: fraction of rows that start from zero states
    dropout: Annotated[float, below_one("such as 0.1")] = 0.1
    chunks: int = 1  # for mode=tbtt: chunks of seq_len tokens that each lane reads in one step
    through_time: bool = False  # for mode=tbtt: backpropagate through all chunks of a step


@dataclass
class OptimConfig:
    """The optimizer, a phase's learning-rate schedule, gradient clipping, and refused steps."""

    name: Annotated[str, one_of(OPTIMIZERS)] = "adamw"  # the optimizer, a name in hybridtron/optimizers
    # AdamW's beta_1 and beta_2; for name=muon: beta_1 and beta_2 for the weights that AdamW updates
    betas: Annotated[list[float], below_one("such as 0.9 and 0.95")] = field(default_factory=lambda: [0.9, 0.95])
    eps: Annotated[float, above(0)] = 1e-8  # AdamW's epsilon
    # decoupled weight decay of matrices, convolutions, embedding and head
    weight_decay: Annotated[float, at_least(0)] = 0.1
    # constant: weight_decay in every step; lr: weight_decay * (the step's learning rate / the peak rate)
    weight_decay_schedule: DecaySchedule = DecaySchedule.constant
    decay_all: bool = False  # also decay norms, biases, A_log, D and dt_bias
    clip: Annotated[float, above(0)] = 1.0  # maximum global gradient norm; larger gradients are scaled down
    # shape of the learning rate after the warm-up; wsd: constant, then linear decay
    schedule: Annotated[str, one_of(SHAPES)] = "cosine"
    # length at learning rate 0 before the warm-up, in tokens, or as a share of the schedule; a schedule covers a phase
    # and the phases directly after it with lr_piece=carry_on
    hold: Annotated[str, A_SHARE] = "0"
    warmup: Annotated[str, A_SHARE] = "1%"  # length of the warm-up, in tokens, or as a share of the schedule
    # for schedule=wsd: length of the decay, in tokens, or as a share of the schedule
    decay: Annotated[str, A_SHARE] = "20%"
    # learning rate at the end of the schedule, as a fraction of the peak rate
    final_lr: Annotated[float, from_zero_to_one("a fraction of each phase's lr")] = 0.1
    z_loss: Annotated[float, at_least(0)] = 0.0  # weight of the z-loss, the squared log-sum-exp of the logits
    # a step is refused if the logarithm of its gradient norm is more than this number of standard deviations above the
    # mean over recent steps; null: no such limit
    spike: Annotated[float | None, above(0, "such as 6, or null")] = 6.0
    # after this number of refused steps in a row, the run rolls back to a checkpoint and skips the steps' data
    skips: Annotated[int, at_least(1)] = 5
    muon: MuonOptions = field(default_factory=MuonOptions)


@dataclass
class ParallelConfig:
    """The parallel layout: how ranks divide the model and the tokens. The remaining ranks are data parallel."""

    tensor: Annotated[int, at_least(1)] = 1  # tensor parallelism: ranks that divide the weights of every layer
    sequence: bool = False  # sequence parallelism: tensor-parallel ranks also divide the tokens of the residual stream
    # with sequence=true: gather the inputs of sub-layers again in the backward pass instead of saving them
    regather: bool = False
    pipeline: Annotated[int, at_least(1)] = 1  # pipeline parallelism: ranks that divide the layers
    virtual_pipeline: Annotated[int, at_least(1)] = 1  # virtual (interleaved) stages of each pipeline rank
    context: Annotated[int, at_least(1)] = 1  # context parallelism: ranks that divide the tokens of every row
    # expert parallelism: ranks that divide the routed experts; must divide the number of ranks in a pipeline stage
    expert: Annotated[int, at_least(1)] = 1
    # ranks that divide the inner channels of every routed expert: parallel.tensor or 1; 1 with tensor above 1 needs
    # sequence=true; null: parallel.tensor
    expert_tensor: Annotated[int | None, at_least(1)] = None
    distributed_optimizer: bool = True  # shard the optimizer's state over data-parallel ranks
    # sub-layers that the backward pass recomputes. none: no sub-layers; selective: those that mix tokens; layer: all
    recompute: Recompute = Recompute.none
    # number of sub-layers, at the start of every stage, that offload their saved activations to the host's memory
    offload: Annotated[int, at_least(0)] = 0
    transformer_engine: bool = False  # use Transformer Engine's linear layers instead of megatron-core's; needs a GPU
    # matmuls add weight gradients directly to the buffer that accumulates them over micro-batches; null: true on a GPU
    # with torch 2.13 or newer and run.compile=false, except in Transformer Engine's layers
    gradient_accumulation_fusion: bool | None = None
    # reduce gradients during the backward pass; null: true with several data-parallel ranks
    overlap_grad_reduce: bool | None = None
    # gather weights during the forward pass; needs overlap_grad_reduce and distributed_optimizer; null: true if both
    # are true, there are several data-parallel ranks, and there are no virtual stages
    overlap_param_gather: bool | None = None

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Number of ranks in each mesh dimension that shards weights and states."""
        return {"tensor": self.tensor, "expert_tensor": self.expert_tensor_ranks, "expert": self.expert}

    @property
    def expert_tensor_ranks(self) -> int:
        """Number of ranks that divide the inner channels of every routed expert."""
        if self.expert_tensor is None:
            return self.tensor
        return self.expert_tensor

    @property
    def routes_full_rows(self) -> bool:
        """True if each rank routes all tokens of its rows to experts; otherwise several ranks route parts of a row."""
        return self.context == 1 and self.expert_tensor_ranks == self.tensor

    @property
    def model_ranks(self) -> int:
        """Number of ranks in one model replica. All ranks of a replica work on the same rows."""
        return self.tensor * self.pipeline * self.context

    @property
    def fewest_ranks(self) -> int:
        """Smallest number of ranks that form whole replicas and can divide the experts."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert * self.expert_tensor_ranks)


@dataclass
class PrecisionConfig:
    """Precision of weights, activations, gradients and moments."""

    # number format of weights and activations; fp8_*: FP8 in the matmuls of large projections, bf16 everywhere else
    name: Precision = Precision.fp32
    # number format in which gradients are accumulated over micro-batches and ranks; bf16 halves memory and traffic,
    # with rounding errors
    gradients: KeptFormat = KeptFormat.fp32
    # number format of the optimizer's stored moments; bf16 halves their memory, with rounding errors
    moments: KeptFormat = KeptFormat.fp32
    # for fp8_*: cast weights to FP8 once per step instead of in every forward pass, and keep the FP8 copy, which takes
    # one byte per weight, or two with Transformer Engine
    cache_weights: bool = False
    emulate: bool = False  # for fp8_*: emulate FP8 rounding on any device, to study its effect on a recipe; slow
    # for fp8_*: number of sub-layers at the start that stay in bf16
    bf16_first: Annotated[int, at_least(0)] = 0
    bf16_last: Annotated[int, at_least(0)] = 0  # for fp8_*: number of sub-layers at the end that stay in bf16
    # for fp8_delayed: number of past steps whose largest absolute values determine the scale factors
    history: Annotated[int, at_least(1)] = 1024


@dataclass
class CheckpointConfig:
    """Checkpoints: when they are written, which are kept, and where they are copied."""

    every: Annotated[str, INTERVAL] = "1000"  # interval between checkpoints, in steps, or in tokens with a unit
    asynchronous: bool = False  # write checkpoints from copies of the weights while training continues
    # number of newest checkpoints to keep; the last checkpoint of each phase is always kept
    keep: Annotated[int, at_least(1)] = 2
    # also keep checkpoints at multiples of this interval, in steps, or in tokens with a unit; null: none
    keep_every: Annotated[str | None, INTERVAL] = None
    keep_best: bool = False  # also keep the checkpoint with the lowest held-out loss
    # address s3://BUCKET/PREFIX to which finished checkpoints are copied; null: no copies
    mirror: Annotated[str | None, matching("s3://[^/]+/.+", "s3://BUCKET/PREFIX, or left out")] = None
    # absolute path of a folder on each node's own disk, for local checkpoints: the node's part, and a copy of another
    # node's part; null: no local checkpoints
    local_dir: Annotated[str | None, matching(r"/[^:,]*", "an absolute path")] = None
    # interval between local checkpoints, in steps, or in tokens with a unit; the newest two are kept
    local_every: Annotated[str, INTERVAL] = "100"
    failures: Annotated[int, at_least(1)] = 3  # training ends after this number of failed writes in a row


@dataclass
class RunConfig:
    """A run: its folder, seed, limits, start weights, evaluations and reports."""

    # name of the run, and of its folder
    name: Annotated[str, not_empty("the run's folder is named after it")] = MISSING
    # recipe of the run, for the model card; null: NAME for `recipe=NAME`, and for a path the file's name with a digest
    recipe: str | None = None
    # folder of the run
    dir: Annotated[str, not_empty("name a folder, or leave it out for runs/NAME")] = "runs/${run.name}"
    seed: Annotated[int, at_least(0), at_most(LARGEST)] = 1234  # seed of weights, data order and noise
    # stop after this step of the run; null: at the end of the last phase
    max_steps: Annotated[int | None, at_least(1)] = None
    plan: bool = False  # print the table of phases and exit
    # time limit in minutes, after which the run saves a checkpoint and exits with code 75; null: only SLURM's limit
    max_minutes: Annotated[float | None, above(0)] = None
    # time limit in seconds for a step, an evaluation, a checkpoint or an export; the run fails at this limit
    timeout: Annotated[float, at_least(1, "and longer than a step takes")] = 1800.0
    # how many times in a row, without a newer checkpoint, all processes start again inside the launch after a fault of
    # one of them; null: 3 in jobs of `hybridtron submit`, else 0
    restarts: Annotated[int | None, at_least(0)] = None
    deterministic: bool = False  # bit-reproducible on the same layout and machine; slower
    # steps between comparisons of weights over data-parallel ranks; if set, each step also compares a rank's optimizer
    # state with its state after the last update; null: no comparison (docs/scale.md)
    verify_state: Annotated[int | None, at_least(1)] = None
    # steps between checks in which all data-parallel ranks compute the same micro-batch, and must get gradients with
    # equal bits; needs run.deterministic=true; null: no check (docs/scale.md)
    verify_every: Annotated[int | None, at_least(1)] = None
    # auto: resume from the newest valid checkpoint; never: start from scratch; or a checkpoint's folder
    resume: str = "auto"
    # accept other data, another data order or another tokenizer than the checkpoint's
    accept_data_changes: bool = False
    # weights that a new run starts from: a checkpoint's folder; or a run's folder RUN, which stands for its newest
    # checkpoint; or RUN@best, which stands for the run's checkpoint with the lowest held-out loss; null: random weights
    weights: str | None = None
    # description of the pretrained weights that the recipe needs; if it is set, run.weights must be set too; null: the
    # recipe needs no pretrained weights
    tunes: str | None = None
    # decay, such as 0.999, of a moving average of the fp32 weights; checkpoints store the average, and the commands
    # export, evaluate and generate use it with --ema; null: no average
    ema: Annotated[float | None, above(0), below_one("such as 0.999")] = None
    compile: bool = False  # compile the model with torch.compile
    # run both passes of a micro-batch from a CUDA graph, which the host launches as a whole; needs a CUDA device, and
    # no GPU has captured such a graph so far (docs/rehearse.md)
    cuda_graph: bool = False
    log_every: Annotated[int, at_least(1)] = 10  # steps between log lines if stderr is not a terminal
    eval_every: Annotated[str, INTERVAL] = "1000"  # interval between validations, in steps, or in tokens with a unit
    # number of held-out tokens that a validation reads for each length in eval_lengths
    eval_tokens: Annotated[str, TOKENS] = "1M"
    # lengths of held-out rows, in multiples of the training length
    eval_lengths: Annotated[list[int], at_least(1)] = field(default_factory=lambda: [1, 2, 3, 4])
    # suite to evaluate during training: samba, span, length, hax, all, or a YAML file as for `evaluate --tasks`
    evaluate: str | None = None
    # interval between evaluations of the suite, in steps, or in tokens with a unit; the suite also runs at each phase's
    # end
    evaluate_every: Annotated[str, INTERVAL] = "10000"
    # samples of each task and length in these evaluations; null: the suite's number
    evaluate_samples: Annotated[int | None, at_least(1)] = None
    # length, in tokens, of a sample text that is generated at the end of the run; 0: no sample text
    sample_tokens: Annotated[int, at_least(0)] = 0
    sample_prompt: str = "The "  # beginning of the sample text
    layer_norms: bool = False  # add per-layer norms of parameters and gradients to the metrics
    profile: Annotated[list[int], at_least(1)] = field(default_factory=list)  # steps to profile, such as [10,11]
    wandb: str | None = None  # project at Weights & Biases for the metrics; null: none
    mlflow: str | None = None  # experiment in MLflow for the metrics; null: none
    # op's name -> implementation to use, for debugging: {selective_scan: reference}, or {"*": reference} for all ops,
    # which is very slow (docs/debugging.md)
    force_ops: dict[str, str] = field(default_factory=dict)
    # number of newest refused steps whose batches are stored in the run's folder for `hybridtron replay`; 0: none
    keep_refused: Annotated[int, at_least(0)] = 8
    # your hook classes, which training calls (docs/extending.md): MODULE.CLASS, or {MODULE.CLASS: {OPTION: VALUE}};
    # ignored in configurations that runs have written
    hooks: list[Any] = field(default_factory=list)


@dataclass
class Config:
    """A run's full configuration."""

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
