"""Rules for the parallel layout: ranks must be able to divide the model, the rows and the batch evenly.

- tensor parallelism: ranks get equal shards of every layer
- pipeline parallelism: every stage gets at least one sub-layer
- context parallelism: ranks get equal numbers of tokens from every row
- data parallelism: ranks get equal numbers of micro-batches; with virtual stages, each number must be a multiple of
  `parallel.pipeline`
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import FP8_MULTIPLES, Recompute
from hybridtron.config.pipeline_layout import multiples_near, stage_problems, world_problems
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import ParallelConfig
from hybridtron.problems import Problem, choice

MAX_TENSOR = 64  # largest tensor-parallel size that a message suggests


def parallel_problems(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """List all reasons why a phase can't run in its parallel layout on `world_size` processes.

    If `world_size` is None, the smallest number of processes that the layout needs is assumed.
    """
    parallel = phase.config.parallel
    sizes = (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context, parallel.expert)
    if min(*sizes, parallel.expert_tensor_ranks) < 1:
        return  # `limit_problems` reports values below 1
    yield from _overlap(parallel)
    if parallel.gradient_accumulation_fusion and phase.config.run.compile:
        yield Problem(
            "parallel.gradient_accumulation_fusion",
            "unsupported",
            "is true, but torch.compile can't trace it: set it or run.compile to false",
        )
    yield from _offload(phase)
    yield from _transformer_engine(parallel)
    yield from _tensor(phase)
    yield from _pipeline(phase)
    yield from _context(phase)
    model_ranks = parallel.model_ranks
    world_size = parallel.fewest_ranks if world_size is None else world_size
    uneven = world_problems(parallel, world_size)
    yield from uneven
    if not uneven:
        yield from _batches(phase, world_size // model_ranks)


def _overlap(parallel: ParallelConfig) -> Iterator[Problem]:
    """Report `overlap_param_gather` without the settings that it needs.

    Ranks gather weights only with the distributed optimizer, which updates the weights in shards. Megatron gathers
    weights during the forward pass only if it reduces gradients during the backward pass.
    """
    possible = parallel.distributed_optimizer and parallel.overlap_grad_reduce is not False
    if parallel.overlap_param_gather and not possible:
        needed = "parallel.distributed_optimizer=true and parallel.overlap_grad_reduce=true"
        yield Problem(
            "parallel.overlap_param_gather",
            "needs-other-key",
            f"is true, but needs {needed}: set both keys, or use false",
        )


def _offload(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report `offload` together with settings that do not support it.

    When autograd saves a tensor for the backward pass, a hook moves the tensor to the host. torch.compile can't trace
    such hooks. With recomputation, autograd saves no tensors that could be moved.
    """
    parallel = phase.config.parallel
    is_violated = {
        "parallel.recompute=none": parallel.recompute is not Recompute.none,
        "parallel.transformer_engine=false": parallel.transformer_engine,
        "run.compile=false": phase.config.run.compile,
        "precision.emulate=true": phase.precision.name in FP8_MULTIPLES and not phase.precision.emulate,
    }
    if parallel.offload and (needed := [setting for setting, violated in is_violated.items() if violated]):
        yield Problem(
            "parallel.offload",
            "needs-other-key",
            f"is {parallel.offload}, but needs {' and '.join(needed)}: set these, or use 0",
        )


def _transformer_engine(parallel: ParallelConfig) -> Iterator[Problem]:
    """Report `transformer_engine` if Transformer Engine is not installed."""
    if parallel.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        cure = "run pip install transformer-engine[pytorch], or use false for megatron-core's layers"
        yield Problem(
            "parallel.transformer_engine", "not-installed", f"is true, but transformer_engine is not installed: {cure}"
        )


def _tensor(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report layers and vocabularies that tensor-parallel ranks can't divide evenly.

    With sequence parallelism, also report rows whose tokens the ranks can't divide evenly.
    """
    parallel = phase.config.parallel
    seq_len = phase.settings.seq_len
    tensor = parallel.tensor
    if tensor == 1 or phase.parsed is None:
        return
    full = parallel.expert_tensor_ranks < tensor
    if reasons := uncuttable(phase.parsed, tensor, full):
        fitting = [size for size in range(1, MAX_TENSOR + 1) if not uncuttable(phase.parsed, size, full)]
        yield Problem(
            "parallel.tensor", "not-divisible", f"is {tensor}, but {'; '.join(reasons)}: use {choice(fitting)}"
        )
    if parallel.sequence and seq_len > 0 and seq_len % tensor:
        yield Problem(
            phase.own_key("seq_len"),
            "not-divisible",
            f"is {seq_len}, which with parallel.sequence must be divisible by parallel.tensor={tensor}: "
            f"use {choice(multiples_near(tensor, seq_len))}",
        )


def _context(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report layers and settings without support for context parallelism, and rows that can't be divided evenly."""
    context = phase.config.parallel.context
    length = phase.settings.seq_len
    if context == 1 or phase.parsed is None:
        return
    yield from unshareable(phase.parsed, context)
    if phase.config.parallel.sequence:
        tensor = phase.config.parallel.tensor
    else:
        tensor = 1
    if length > 0 and length % (context * tensor):
        yield Problem(
            phase.own_key("seq_len"),
            "not-divisible",
            f"is {length}, which must be divisible by {context * tensor}, since parallel.context={context}: "
            f"use {choice(multiples_near(context * tensor, length))}",
        )
    if phase.config.run.compile:
        yield Problem(
            "parallel.context",
            "unsupported",
            f"is {context}, but torch.compile can't trace it: use 1, or run.compile=false",
        )
    if phase.chunks_together > 1:
        yield Problem(
            "parallel.context",
            "unsupported",
            f"is {context}, but {phase.own_key('states')} reads {phase.chunks_together} chunks in one forward pass: "
            "use 1, or a single chunk with a larger seq_len",
        )
    kinds = phase.carried_kinds
    sizes = phase.parsed.sizes
    for letter, spec in phase.parsed.by_letter.items():
        grown = [n for n, part in spec.state_parts(sizes).items() if part.kind in kinds and None in part.shape]
        if grown:
            what = (
                f"includes the {grown[0]} of model.layers.{letter}, which grow with every row: use parallel.context=1"
            )
            yield Problem("states.carry", "unsupported", what)


def unshareable(arch: Architecture, context: int) -> Iterator[Problem]:
    """Report sub-layers that do not support context parallelism."""
    if context > 1 and (unable := [letter for letter, spec in arch.by_letter.items() if not spec.shares_rows]):
        letters = ", ".join(f"model.layers.{letter}" for letter in unable)
        yield Problem(
            "parallel.context", "unsupported", f"is {context}, but {letters} can't divide a row among ranks: use 1"
        )


def uncuttable(arch: Architecture, tensor: int, full_experts: bool = False) -> list[str]:
    """List the reasons why the model cannot be sharded over `tensor` tensor-parallel ranks, as clauses for a message.

    With `full_experts` (`parallel.expert_tensor=1`) a rank has all inner channels of its routed experts. Entries in
    `model.layers` that the pattern does not use are ignored.
    """
    reasons = [
        f"model.layers.{letter}.{problem.key} {problem.message}"
        for letter, spec in arch.by_letter.items()
        for problem in spec.layout_problems(arch.sizes, tensor)
        if not (full_experts and isinstance(spec, MoESpec) and problem.key == MoESpec.width_option)
    ]
    if arch.model.vocab_size % tensor:
        reasons.append(f"model.vocab_size is {arch.model.vocab_size}, which {tensor} ranks can't divide evenly")
    return reasons


def _pipeline(phase: ResolvedPhase) -> Iterator[Problem]:
    parallel = phase.config.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            "parallel.virtual_pipeline",
            "needs-other-key",
            f"is {parallel.virtual_pipeline}, but with parallel.pipeline=1 there are no stages to interleave: "
            "use 1, or parallel.pipeline of at least 2",
        )
    elif phase.parsed is not None and parallel.virtual_pipeline > 1 and phase.parsed.carries_embedding:
        why = "but virtual stages of one rank can't share the weights of shared layers: use 1"
        yield Problem("parallel.virtual_pipeline", "unsupported", f"is {parallel.virtual_pipeline}, {why}")
    elif phase.parsed is not None:
        yield from stage_problems(phase.parsed, parallel)


def _batches(phase: ResolvedPhase, data_ranks: int) -> Iterator[Problem]:
    """Report batch sizes, including those in a ramp, that can't be divided evenly among ranks and micro-batches."""
    sizes = {"global_batch": phase.settings.global_batch}
    if (ramp := phase.settings.ramp) is not None:
        sizes |= {"ramp.start": ramp.start, "ramp.step": ramp.step}
    for name, rows in sizes.items():
        yield from _shared_out(phase.own_key(name), rows, phase, data_ranks)


def _shared_out(key: str, rows: int, phase: ResolvedPhase, data_ranks: int) -> Iterator[Problem]:
    """Report `rows`, the value under `key`, if data-parallel ranks would get unequal numbers of micro-batches.

    With virtual stages, a rank's micro-batch count must be a multiple of `parallel.pipeline`.
    """
    parallel = phase.config.parallel
    micro = phase.settings.micro_batch
    chunks = phase.states.chunks  # with tbtt, a step reads this number of chunks from each lane; a chunk is a row
    if min(rows, micro, chunks) < 1 or rows % (micro * chunks):
        return  # `phase_problems` reports this
    shared = micro * data_ranks * chunks
    if rows % shared:
        fitting = choice(multiples_near(shared, rows))
        yield Problem(
            key,
            "not-divisible",
            f"is {rows}, which {data_ranks} data-parallel ranks can't divide into micro-batches of {micro} rows: "
            f"use {fitting}, or another micro_batch",
        )
        return
    together = micro * data_ranks * phase.chunks_together  # rows of one micro-batch on all data-parallel ranks
    if parallel.virtual_pipeline > 1 and (count := rows // together) % parallel.pipeline:
        fitting = choice(multiples_near(math.lcm(shared, together * parallel.pipeline), rows))
        yield Problem(
            key,
            "not-divisible",
            f"is {rows}, which gives {count} micro-batches for each data-parallel rank, but with virtual stages the "
            f"number must be a multiple of parallel.pipeline={parallel.pipeline}: "
            f"use {fitting}, or another micro_batch",
        )
