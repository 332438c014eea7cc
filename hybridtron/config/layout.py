"""Assign sub-layers to pipeline ranks, and count the data-parallel ranks. Needs no torch and no process group.

There are `pipeline * virtual_pipeline` stages ("chunks" in names) of consecutive sub-layers. Stage c runs on pipeline
rank c % pipeline as its virtual stage c // pipeline (Megatron's interleaved order), so a micro-batch passes rank after
rank, and then the next virtual stage of each. Bars in the pattern say where the stages end. Without bars they are
balanced: the cut minimizes the cost of the most expensive stage, and ties go to the most even cut. Every stage gets at
least one sub-layer.

The cost of a sub-layer is its forward FLOPs per token at one sequence length (the longest of any phase: a layout does
not change between phases), where the memory-bound scan is weighted by `SCAN_WEIGHT`. The embedding counts with the
first sub-layer, the head and the loss with the last.

Why 80: with 0.8% of its FLOPs in the scan, Mamba 1.3B trains at 0.69 times the speed of Llama-2 1.3B on H100 (Samba,
Table 3: 17.8 and 25.9 times 1e5 tokens/s on 64). If all else runs equally fast per FLOP, the scan costs 80 times its
FLOPs. The same weight predicts Samba 1.3B at 0.97 times Llama-2's speed, which is the paper's measurement.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.problems import ConfigError, Problem

SCAN_WEIGHT = 80
_LOSS_FLOPS = 5  # per logit: maximum, difference, exponential, sum, gradient; memory-bound, so weighted too


def chunk_count(parallel: ParallelConfig) -> int:
    """Count the pipeline stages, including virtual ones."""
    return parallel.pipeline * parallel.virtual_pipeline


def chunks_on(parallel: ParallelConfig, rank: int) -> range:
    """Return the stages that a pipeline rank runs, as its virtual stages 0, 1, ..."""
    return range(rank, chunk_count(parallel), parallel.pipeline)


def stages_of(config: Config) -> tuple[range, ...]:
    """Return this run's sub-layers per pipeline stage; see `stage_layers`."""
    return stage_layers(config.model, config.parallel, max(phase.seq_len for phase in config.phases))


def stage_layers(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> tuple[range, ...]:
    """Return the sub-layers (global indices) of every pipeline stage, in model order.

    Raises ConfigError if the sub-layers cannot be divided into these stages.
    """
    if problems := stage_problems(model, parallel):
        raise ConfigError(problems)
    arch = architecture(model)
    chunks = chunk_count(parallel)
    sizes = arch.stages
    if len(sizes) != chunks:
        costs = layer_costs(model, seq_len)
        units = iter(arch.inseparable)
        runs = balanced([sum(costs[unit.start : unit.stop]) for unit in arch.inseparable], chunks)
        sizes = tuple(sum(map(len, itertools.islice(units, run))) for run in runs)
    ends = list(itertools.accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def stage_problems(model: ModelConfig, parallel: ParallelConfig) -> list[Problem]:
    """List why the sub-layers cannot be divided into this layout's stages. A single stage ignores bars."""
    arch = architecture(model)
    chunks = chunk_count(parallel)
    bars = len(arch.stages)
    layers = len(arch.inseparable)
    if chunks == 1:
        return []
    product = f"pipeline={parallel.pipeline} times virtual_pipeline={parallel.virtual_pipeline}"
    if bars > 1 and bars != chunks:
        pairs = [(bars // stages, stages) for stages in range(1, bars) if bars % stages == 0]
        fitting = " or ".join(f"pipeline={size} virtual_pipeline={stages}" for size, stages in pairs)
        message = (
            f"has {bars - 1} bars, which make {bars} stages, but {product} are {chunks}: use {fitting}, or no bars"
        )
        return [Problem("model.pattern", "conflict", message)]
    if layers < chunks:
        message = f"is {parallel.pipeline}, but {product} are {chunks} stages for {layers} layers: use at most {layers}"
        return [Problem("parallel.pipeline", "out-of-range", message)]
    return []


def shared_homes(model: ModelConfig, stages: Sequence[range]) -> dict[str, list[int]]:
    """Return the stages that hold a letter's shared weights, by letter, for letters in several stages."""
    arch = architecture(model)
    homes = {
        letter: [chunk for chunk, stage in enumerate(stages) if letter in arch.letters[stage.start : stage.stop]]
        for letter in dict.fromkeys(arch.letters)
        if arch.shared_names(letter)
    }
    return {letter: chunks for letter, chunks in homes.items() if len(chunks) > 1}


def layer_costs(model: ModelConfig, seq_len: int) -> tuple[int, ...]:
    """Return the weighted forward FLOPs per token for every sub-layer.

    The embedding counts with the first sub-layer, the head and the loss with the last.
    """
    arch = architecture(model)
    by_letter = {letter: mixer_cost(spec, arch.sizes, seq_len) for letter, spec in arch.by_letter.items()}
    costs = [by_letter[letter] for letter in arch.letters]
    costs[0] += embedding_cost(model)
    costs[-1] += head_cost(model)
    return tuple(costs)


def mixer_cost(spec: MixerSpec, sizes: ModelSizes, seq_len: int) -> int:
    """Return one sub-layer's weighted forward FLOPs per token."""
    parts = spec.flops(sizes, seq_len)
    return round(sum(flops * (SCAN_WEIGHT if part == "scan" else 1) for part, flops in parts.items()))


def embedding_cost(model: ModelConfig) -> int:
    """Return the embedding lookup's weighted cost per token: `width` values are read and written."""
    return SCAN_WEIGHT * 2 * model.width


def head_cost(model: ModelConfig) -> int:
    """Return the weighted FLOPs per token for the projection to the vocabulary and for the loss."""
    return (2 * model.width + SCAN_WEIGHT * _LOSS_FLOPS) * model.vocab_size


def balanced(costs: Sequence[int], chunks: int) -> tuple[int, ...]:
    """Return the number of items per chunk: the smallest largest sum, then the smallest sum of squares.

    The smallest possible largest sum is found by bisection. Dynamic programming finds the most even cut that keeps to
    it.
    """
    assert 1 <= chunks <= len(costs)
    sums = [0, *itertools.accumulate(costs)]
    low = max(costs)
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _chunks_needed(sums, middle) <= chunks:
            low = low
            high = middle
        else:
            low = middle + 1
            high = high
    squares = {0: 0}  # smallest sum of squares of the chunks so far, by the index at which the last one ends
    came_from: list[dict[int, int]] = []
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
    """Count the chunks needed if each is filled greedily up to a sum of `limit`."""
    needed = at = 0
    while at < len(sums) - 1:
        at = bisect_right(sums, sums[at] + limit) - 1
        needed += 1
    return needed


def data_parallel(parallel: ParallelConfig, world_size: int) -> int:
    """Count the data-parallel ranks. Raises ConfigError if the world size does not divide evenly."""
    if problems := world_problems(parallel, world_size):
        raise ConfigError(problems)
    return world_size // parallel.model_ranks


def with_overlap(parallel: ParallelConfig, copies: int) -> ParallelConfig:
    """Return the layout with definite overlap settings, for `copies` ranks that hold the same weights.

    With virtual stages, weights are gathered during the forward pass only if the user asks for it: Megatron then sends
    the weights of a stage in one message with several dtypes, which gloo mixes up.
    """
    reduce = parallel.overlap_grad_reduce
    gather = parallel.overlap_param_gather
    reduce = copies > 1 or bool(gather) if reduce is None else reduce
    if gather is None:
        gather = copies > 1 and reduce and parallel.distributed_optimizer and parallel.virtual_pipeline == 1
    return replace(parallel, overlap_grad_reduce=reduce, overlap_param_gather=gather)


def world_problems(parallel: ParallelConfig, world_size: int) -> list[Problem]:
    """List why `world_size` processes cannot be arranged into this layout."""
    model_ranks = parallel.model_ranks
    if world_size >= 1 and world_size % model_ranks == 0:
        return []
    fitting = " or ".join(map(str, multiples_near(model_ranks, world_size)))
    if parallel.context > 1:
        times = f" times parallel.context={parallel.context}"
    else:
        times = ""
    message = (
        f"is {parallel.tensor}, times parallel.pipeline={parallel.pipeline}{times} makes {model_ranks} ranks a model, "
        f"which {world_size} process{'es' * (world_size != 1)} can't be shared into: start {fitting}"
    )
    if world_size == 1:
        message += f", by torchrun --nproc-per-node {model_ranks} -m hybridtron train ..."
    return [Problem("parallel.tensor", "not-divisible", message)]


def multiples_near(unit: int, size: int) -> list[int]:
    """Return the multiples of `unit` next to `size`; never zero."""
    below = size // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


@dataclass(frozen=True)
class ProcessLaunch:
    """The rank and world size with which a process was started."""

    rank: int
    world_size: int


def launched(environment: Mapping[str, str] = os.environ) -> ProcessLaunch:
    """Read this process's rank and world size from torchrun's variables, or from srun's with one task per process.

    Returns rank 0 and size 1 if neither started this process.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environment and environment.get(size, "").isdigit():
            return ProcessLaunch(int(environment[rank]), int(environment[size]))
    return ProcessLaunch(0, 1)


def fp8_layers(config: Config) -> range:
    """Return the sub-layers whose large projections multiply in FP8, if the precision is an FP8 one."""
    last = len(architecture(config.model).specs) - config.precision.bf16_last
    return range(config.precision.bf16_first, max(config.precision.bf16_first, last))
