"""Rules for a layout: the model, the batch and the processes must divide evenly as `parallel` says.

Tensor-parallel ranks must get equal shares of every layer. Every pipeline stage must get a sub-layer. Every
data-parallel rank must get equally many micro-batches, and a number that the pipeline's schedule can run.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.choices import FP8_MULTIPLES, Recompute
from hybridtron.config.layout import multiples_near, stage_problems, world_problems
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import ParallelConfig
from hybridtron.problems import Problem, choice

MAX_TENSOR = 64  # the largest size that a message proposes


def parallel_problems(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """List everything that prevents a phase from running in its layout on N processes (None: the fewest)."""
    parallel = phase.config.parallel
    if min(parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context) < 1:
        return  # reported by their limits
    yield from _overlap(parallel)
    if parallel.gradient_accumulation_fusion and phase.config.run.compile:
        yield Problem(
            "parallel.gradient_accumulation_fusion",
            "unsupported",
            "is true, which run.compile can't trace: set one to false",
        )
    yield from _offload(phase)
    yield from _transformer_engine(parallel)
    yield from _tensor(phase)
    yield from _pipeline(phase)
    yield from _context(phase)
    model_ranks = parallel.model_ranks
    world_size = model_ranks if world_size is None else world_size
    uneven = world_problems(parallel, world_size)
    yield from uneven
    if not uneven:
        yield from _batches(phase, world_size // model_ranks)


def _overlap(parallel: ParallelConfig) -> Iterator[Problem]:
    """Check the settings that gathering weights during the forward pass needs.

    Weights are gathered only where the distributed optimizer shards them, and the gradients must be reduced in time.
    """
    possible = parallel.distributed_optimizer and parallel.overlap_grad_reduce is not False
    if parallel.overlap_param_gather and not possible:
        needed = "parallel.distributed_optimizer=true and parallel.overlap_grad_reduce=true"
        yield Problem(
            "parallel.overlap_param_gather", "needs-other-key", f"is true, which needs {needed}: set both, or use false"
        )


def _offload(phase: ResolvedPhase) -> Iterator[Problem]:
    """Check the settings that offloading needs.

    Offloading moves tensors that autograd saves, by hooks that torch.compile cannot trace. With recomputation there are
    no such tensors.
    """
    parallel = phase.config.parallel
    others = {
        "parallel.recompute=none": parallel.recompute is not Recompute.none,
        "parallel.transformer_engine=false": parallel.transformer_engine,
        "run.compile=false": phase.config.run.compile,
        "precision.emulate=true": phase.precision.name in FP8_MULTIPLES and not phase.precision.emulate,
    }
    if parallel.offload and (needed := [setting for setting, is_against in others.items() if is_against]):
        yield Problem(
            "parallel.offload",
            "needs-other-key",
            f"is {parallel.offload}, which needs {' and '.join(needed)}: or use 0",
        )


def _transformer_engine(parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that Transformer Engine is installed if its layers are requested."""
    if parallel.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        cure = "pip install transformer-engine[pytorch], or use false for megatron-core's layers"
        yield Problem(
            "parallel.transformer_engine", "not-installed", f"is true, but transformer_engine is not installed: {cure}"
        )


def _tensor(phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that tensor-parallel ranks can divide every layer and the vocabulary evenly.

    With sequence parallelism they must also divide the tokens of a row evenly.
    """
    model = phase.model
    parallel = phase.config.parallel
    seq_len = phase.settings.seq_len
    tensor = parallel.tensor
    if tensor == 1 or phase.arch is None:
        return
    if reasons := uncuttable(model, tensor):
        fitting = [size for size in range(1, MAX_TENSOR + 1) if not uncuttable(model, size)]
        yield Problem(
            "parallel.tensor", "not-divisible", f"is {tensor}, but {'; '.join(reasons)}: use {choice(fitting)}"
        )
    if parallel.sequence and seq_len > 0 and seq_len % tensor:
        yield Problem(
            phase.own_key("seq_len"),
            "not-divisible",
            f"is {seq_len}, which parallel.sequence can't share over parallel.tensor={tensor} ranks: "
            f"use {choice(multiples_near(tensor, seq_len))}",
        )


def _context(phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that every layer supports context parallelism and the ranks divide each row evenly."""
    context = phase.config.parallel.context
    length = phase.settings.seq_len
    if context == 1 or phase.arch is None:
        return
    yield from unshareable(phase.arch, context)
    if phase.config.parallel.sequence:
        tensor = phase.config.parallel.tensor
    else:
        tensor = 1
    if length > 0 and length % (context * tensor):
        yield Problem(
            phase.own_key("seq_len"),
            "not-divisible",
            f"is {length}, which parallel.context={context} can't share out: "
            f"use {choice(multiples_near(context * tensor, length))}",
        )
    if phase.config.run.compile:
        yield Problem(
            "parallel.context",
            "unsupported",
            f"is {context}, which run.compile can't trace: use 1, or run.compile=false",
        )
    if phase.chunks_together > 1:
        yield Problem(
            "parallel.context",
            "unsupported",
            f"is {context}, but {phase.own_key('states')} runs {phase.chunks_together} chunks of a row in one pass: "
            "use 1, or rows as long as those chunks together",
        )
    kinds = phase.carried_kinds
    sizes = phase.arch.sizes
    for letter, spec in phase.arch.by_letter.items():
        grown = [n for n, part in spec.state_parts(sizes).items() if part.kind in kinds and None in part.shape]
        if grown:
            what = f"takes the {grown[0]} of model.layers.{letter}, which grow with every row: use parallel.context=1"
            yield Problem("states.carry", "unsupported", what)


def unshareable(arch: Architecture, context: int) -> Iterator[Problem]:
    """Report layers of the pattern that do not support context parallelism."""
    if context > 1 and (whole := [letter for letter, spec in arch.by_letter.items() if not spec.shares_rows]):
        letters = ", ".join(f"model.layers.{letter}" for letter in whole)
        yield Problem(
            "parallel.context", "unsupported", f"is {context}, but {letters} can't share a row out over ranks: use 1"
        )


def uncuttable(model: ModelConfig, tensor: int) -> list[str]:
    """List the reasons why the model cannot be sharded over N tensor-parallel ranks, one clause each.

    Letters that the pattern does not use don't count.
    """
    arch = architecture(model)
    reasons = [
        f"model.layers.{letter}.{problem.key} {problem.message}"
        for letter, spec in arch.by_letter.items()
        for problem in spec.layout_problems(arch.sizes, tensor)
    ]
    if model.vocab_size % tensor:
        reasons.append(f"model.vocab_size is {model.vocab_size}, which {tensor} ranks can't share evenly")
    return reasons


def _pipeline(phase: ResolvedPhase) -> Iterator[Problem]:
    parallel = phase.config.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            "parallel.virtual_pipeline",
            "needs-other-key",
            f"is {parallel.virtual_pipeline}, but one pipeline rank has nothing to interleave: "
            "use 1, or parallel.pipeline of at least 2",
        )
    elif phase.arch is not None and parallel.virtual_pipeline > 1 and phase.arch.carries_embedding:
        why = "but a rank would hold what places of a letter share in each of its virtual stages: use 1"
        yield Problem("parallel.virtual_pipeline", "unsupported", f"is {parallel.virtual_pipeline}, {why}")
    elif phase.arch is not None:
        yield from stage_problems(phase.model, parallel)


def _batches(phase: ResolvedPhase, data_ranks: int) -> Iterator[Problem]:
    """Check that every step's rows divide evenly, also while the batch grows."""
    sizes = {"global_batch": phase.settings.global_batch}
    if (ramp := phase.settings.ramp) is not None:
        sizes |= {"ramp.start": ramp.start, "ramp.step": ramp.step}
    for name, rows in sizes.items():
        yield from _shared_out(phase.own_key(name), rows, phase, data_ranks)


def _shared_out(key: str, rows: int, phase: ResolvedPhase, data_ranks: int) -> Iterator[Problem]:
    """Check that every data-parallel rank gets equally many micro-batches.

    With virtual stages, their number must be a multiple of the pipeline's size.
    """
    parallel = phase.config.parallel
    micro = phase.settings.micro_batch
    chunks = phase.states.chunks  # consecutive chunks of a lane count as rows of the batch
    if min(rows, micro, chunks) < 1 or rows % (micro * chunks):
        return  # reported by the phase's own rules
    shared = micro * data_ranks * chunks
    if rows % shared:
        fitting = choice(multiples_near(shared, rows))
        yield Problem(
            key,
            "not-divisible",
            f"is {rows}, must share out to {data_ranks} data-parallel ranks in micro batches of "
            f"{micro}: use {fitting}, or another micro_batch",
        )
        return
    together = micro * data_ranks * phase.chunks_together  # rows of one micro-batch on all data-parallel ranks
    if parallel.virtual_pipeline > 1 and (count := rows // together) % parallel.pipeline:
        fitting = choice(multiples_near(math.lcm(shared, together * parallel.pipeline), rows))
        yield Problem(
            key,
            "not-divisible",
            f"is {rows}, which makes {count} micro batches a data-parallel rank; virtual stages of "
            f"parallel.pipeline={parallel.pipeline} need a multiple of {parallel.pipeline}: "
            f"use {fitting}, or another micro_batch",
        )
