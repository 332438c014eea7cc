"""Divide the model's sub-layers among pipeline stages, and count data-parallel ranks.

A sub-layer is one residual step in the model: a mixer or an MLP, with its norm. There are pipeline * virtual_pipeline
stages of consecutive sub-layers. In variables' names, a stage is a "chunk". Stage c runs on pipeline rank c % pipeline,
as the rank's virtual stage c // pipeline (Megatron's interleaved schedule). So a micro-batch runs through every rank's
first virtual stage in turn, then through every rank's second virtual stage, and so on.

Bars (|) in `model.pattern` mark stage boundaries. Without bars, the stages are balanced: the cost of the most expensive
stage is as small as possible. Among such divisions, the division with the smallest sum of squared costs is used. Every
stage gets at least one sub-layer.

A sub-layer's cost is its forward FLOPs per token. FLOPs in a recurrence (scan) are multiplied by SCAN_WEIGHT, since
memory bandwidth limits a scan. FLOPs are counted for the longest row in all phases, since all phases use the same
stages. The embedding's cost is added to the first sub-layer. The cost of head and loss is added to the last sub-layer.

SCAN_WEIGHT was derived from Table 3 in the Samba paper. On 64 H100, Mamba 1.3B reads 17.8e5 tokens/s in training, and
Llama-2 1.3B reads 25.9e5 tokens/s. The scan has 0.8% of Mamba's FLOPs. If all other FLOPs cost the same time in both
models, each FLOP in the scan costs 80 times as much. With this weight, the predicted speed of Samba 1.3B is 0.97 times
Llama-2's speed, which agrees with the paper.

Nothing here needs torch or a process group.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture
from hybridtron.config.schema import Config, ParallelConfig, PrecisionConfig
from hybridtron.problems import ConfigError, Problem

SCAN_WEIGHT = 80
# per logit: max, subtract, exp, sum, gradient; memory bandwidth limits them, so they are multiplied by SCAN_WEIGHT
_LOSS_FLOPS = 5


def chunk_count(parallel: ParallelConfig) -> int:
    """Count the pipeline stages, including virtual stages."""
    return parallel.pipeline * parallel.virtual_pipeline


def chunks_on(parallel: ParallelConfig, rank: int) -> range:
    """Return the indices of the stages on a pipeline rank, ordered by virtual stage."""
    return range(rank, chunk_count(parallel), parallel.pipeline)


def stages_of(arch: Architecture, config: Config) -> tuple[range, ...]:
    """Return the range of sub-layers in each pipeline stage, for the longest row in all phases."""
    return stage_layers(arch, config.parallel, max(phase.seq_len for phase in config.phases))


def stage_layers(arch: Architecture, parallel: ParallelConfig, seq_len: int) -> tuple[range, ...]:
    """Return the range of sub-layers (indices in the model) in each pipeline stage, in model order.

    `seq_len` is the row length for which FLOPs are counted. Raises ConfigError if the sub-layers cannot be divided into
    as many stages as the layout has.
    """
    if problems := stage_problems(arch, parallel):
        raise ConfigError(problems)
    chunks = chunk_count(parallel)
    sizes = arch.stages
    if len(sizes) != chunks:
        costs = layer_costs(arch, seq_len)
        units = iter(arch.inseparable)
        runs = balanced([sum(costs[unit.start : unit.stop]) for unit in arch.inseparable], chunks)
        sizes = tuple(sum(map(len, itertools.islice(units, run))) for run in runs)
    ends = list(itertools.accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def stage_problems(arch: Architecture, parallel: ParallelConfig) -> list[Problem]:
    """List the reasons why the sub-layers cannot be divided into the layout's stages.

    With a single stage, the pattern's bars are ignored.
    """
    chunks = chunk_count(parallel)
    bars = len(arch.stages)
    layers = len(arch.inseparable)
    if chunks == 1:
        return []
    product = f"parallel.pipeline={parallel.pipeline} x virtual_pipeline={parallel.virtual_pipeline}"
    if bars > 1 and bars != chunks:
        pairs = [(bars // stages, stages) for stages in range(1, bars) if bars % stages == 0]
        fitting = " or ".join(f"pipeline={size} virtual_pipeline={stages}" for size, stages in pairs)
        message = (
            f"has {bars - 1} bars for {bars} stages, but {product} needs {chunks} stages: use {fitting}, or no bars"
        )
        return [Problem("model.pattern", "conflict", message)]
    if layers < chunks:
        message = (
            f"is {parallel.pipeline}, but {product} needs {chunks} stages for {layers} layers: use at most {layers}"
        )
        return [Problem("parallel.pipeline", "out-of-range", message)]
    return []


def shared_homes(arch: Architecture, stages: Sequence[range]) -> dict[str, list[int]]:
    """Return letter -> indices of the stages with the letter's sub-layers, for letters with shared weights.

    Letters whose sub-layers are all in a single stage are left out.
    """
    homes = {
        letter: [chunk for chunk, stage in enumerate(stages) if letter in arch.letters[stage.start : stage.stop]]
        for letter in dict.fromkeys(arch.letters)
        if arch.shared_names(letter)
    }
    return {letter: chunks for letter, chunks in homes.items() if len(chunks) > 1}


def layer_costs(arch: Architecture, seq_len: int) -> tuple[int, ...]:
    """Return every sub-layer's cost: its weighted forward FLOPs per token.

    The first sub-layer includes the embedding's cost. The last sub-layer includes the costs of head and loss.
    """
    by_letter = {letter: mixer_cost(spec, arch.sizes, seq_len) for letter, spec in arch.by_letter.items()}
    costs = [by_letter[letter] for letter in arch.letters]
    costs[0] += embedding_cost(arch.model)
    costs[-1] += head_cost(arch.model)
    return tuple(costs)


def mixer_cost(spec: MixerSpec, sizes: ModelSizes, seq_len: int) -> int:
    """Return one sub-layer's weighted forward FLOPs per token."""
    parts = spec.flops(sizes, seq_len)
    return round(sum(flops * (SCAN_WEIGHT if part == "scan" else 1) for part, flops in parts.items()))


def embedding_cost(model: ModelConfig) -> int:
    """Return the cost per token for the embedding lookup, which reads and writes `width` elements."""
    return SCAN_WEIGHT * 2 * model.width


def head_cost(model: ModelConfig) -> int:
    """Return the cost per token for the projection to the vocabulary and the loss."""
    return (2 * model.width + SCAN_WEIGHT * _LOSS_FLOPS) * model.vocab_size


def balanced(costs: Sequence[int], chunks: int) -> tuple[int, ...]:
    """Divide costs into consecutive chunks. Returns how many costs each chunk has.

    The largest chunk sum is as small as possible. Among such divisions, the sum of squared chunk sums is minimal.
    First, bisection finds the smallest possible maximum. Then dynamic programming minimizes the sum of squares over all
    divisions in which no chunk's sum exceeds this maximum.
    """
    assert 1 <= chunks <= len(costs)
    sums = [0, *itertools.accumulate(costs)]
    low = max(costs)
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _chunks_needed(sums, middle) <= chunks:
            high = middle
        else:
            low = middle + 1
    squares = {0: 0}  # end index of the last chunk so far -> smallest sum of squares
    came_from: list[dict[int, int]] = []  # a dictionary for each chunk: end index -> start index
    for chunk in range(1, chunks + 1):
        reached: dict[int, int] = {}
        back: dict[int, int] = {}
        for end in range(chunk, len(sums)):
            starts = [start for start in squares if start < end and sums[end] - sums[start] <= low]
            if starts:
                total, back[end] = min((squares[start] + (sums[end] - sums[start]) ** 2, start) for start in starts)
                reached[end] = total
        squares = reached
        came_from.append(back)
    ends = [len(costs)]
    for back in reversed(came_from):
        ends.append(back[ends[-1]])
    return tuple(end - start for start, end in itertools.pairwise(reversed(ends)))


def _chunks_needed(sums: Sequence[int], limit: int) -> int:
    """Count the chunks if each chunk is filled greedily up to a sum of `limit`.

    `sums` are the cumulative sums of the costs; the first is 0.
    """
    needed = at = 0
    while at < len(sums) - 1:
        at = bisect_right(sums, sums[at] + limit) - 1
        needed += 1
    return needed


def data_parallel(parallel: ParallelConfig, world_size: int) -> int:
    """Count the data-parallel ranks. Raises ConfigError if the world size does not fit the layout."""
    if problems := world_problems(parallel, world_size):
        raise ConfigError(problems)
    return world_size // parallel.model_ranks


def with_overlap(parallel: ParallelConfig, copies: int) -> ParallelConfig:
    """Replace None in `overlap_grad_reduce` and `overlap_param_gather` by true or false.

    `copies` is the number of ranks that hold the same weights. With virtual stages, None becomes false for
    `overlap_param_gather`, since Megatron would gather a stage's weights in one message with several dtypes. The
    backend gloo delivers such messages wrongly.
    """
    reduce = parallel.overlap_grad_reduce
    gather = parallel.overlap_param_gather
    reduce = copies > 1 or bool(gather) if reduce is None else reduce
    if gather is None:
        gather = copies > 1 and reduce and parallel.distributed_optimizer and parallel.virtual_pipeline == 1
    return replace(parallel, overlap_grad_reduce=reduce, overlap_param_gather=gather)


def world_problems(parallel: ParallelConfig, world_size: int) -> list[Problem]:
    """Return a problem if `world_size` ranks can't form whole replicas or divide the experts, else an empty list."""
    model_ranks = parallel.model_ranks
    if world_size >= 1 and world_size % model_ranks == 0:
        return _owner_problems(parallel, world_size)
    fitting = " or ".join(map(str, multiples_near(model_ranks, world_size)))
    if parallel.context > 1:
        times = f" x parallel.context={parallel.context}"
    else:
        times = ""
    message = (
        f"is {parallel.tensor}, times parallel.pipeline={parallel.pipeline}{times} are {model_ranks} ranks a replica, "
        f"which does not divide {world_size} process{'es' * (world_size != 1)}: start {fitting}"
    )
    if world_size == 1:
        message += f", by torchrun --nproc-per-node {model_ranks} -m hybridtron train ..."
    return [Problem("parallel.tensor", "not-divisible", message)]


def _owner_problems(parallel: ParallelConfig, world_size: int) -> list[Problem]:
    """Return the problem if the ranks of a pipeline stage can't divide the experts evenly, else an empty list."""
    stage = world_size // parallel.pipeline
    within = parallel.expert_tensor_ranks
    if stage % (parallel.expert * within) == 0:
        return []
    times = f", times {within} ranks for each expert's channels" if within > 1 else ""
    fitting = " or ".join(map(str, multiples_near(parallel.fewest_ranks, world_size)))
    message = f"is {parallel.expert}{times}, which does not divide the number of ranks in a pipeline stage, {stage}"
    return [Problem("parallel.expert", "not-divisible", f"{message}: start {fitting} processes, or use fewer")]


def multiples_near(unit: int, size: int) -> list[int]:
    """Return the largest multiple of `unit` up to `size`, unless it is 0, and the smallest multiple above `size`."""
    below = size // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


@dataclass(frozen=True)
class ProcessLaunch:
    """The rank and the world size that a launcher has given to this process."""

    rank: int
    world_size: int


def launched(environment: Mapping[str, str] = os.environ) -> ProcessLaunch:
    """Read this process's rank and world size from the environment variables that torchrun or srun sets.

    With srun, each task must be one process. Without such variables the rank is 0 and the world size is 1.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environment and environment.get(size, "").isdigit():
            return ProcessLaunch(int(environment[rank]), int(environment[size]))
    return ProcessLaunch(0, 1)


def fp8_layers(arch: Architecture, precision: PrecisionConfig) -> range:
    """Return the range of sub-layers whose large matmuls use FP8 if `precision.name` is an FP8 precision."""
    last = len(arch.specs) - precision.bf16_last
    return range(precision.bf16_first, max(precision.bf16_first, last))
