"""Rules for `run.verify_every`: data-parallel ranks must compute a micro-batch alone, and with equal bits."""

from __future__ import annotations

from collections.abc import Iterator

from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.problems import Problem

KEY = "run.verify_every"


def corruption_problems(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """List all reasons why data-parallel ranks can't compare the gradients of a micro-batch.

    - run.deterministic: without it, two correct ranks may add in different orders
    - context: a rank has only a shard of each row, and exchanges tokens with other ranks
    - expert: all ranks of a group exchange tokens, so no rank computes a micro-batch alone
    - precision: a pass in FP8 would change the statistics that later passes read
    - compile: ranks may choose different kernels
    - cuda_graph: a graph can't run the additional pass
    """
    config = phase.config
    if config.run.verify_every is None:
        return
    parallel = config.parallel
    needed = {
        "run.deterministic=true": config.run.deterministic,
        "parallel.context=1": parallel.context == 1,
        "parallel.expert=1": parallel.expert == 1,
        "precision=bf16 or fp32": phase.precision.name not in FP8_MULTIPLES,
        "run.compile=false": not config.run.compile,
        "run.cuda_graph=false": not config.run.cuda_graph,
    }
    value = config.run.verify_every
    if missing := [setting for setting, holds in needed.items() if not holds]:
        message = f"is {value}, but needs {' and '.join(missing)}: set these, or use null"
        yield Problem(KEY, "needs-other-key", message)
    if world_size is not None and world_size == max(parallel.model_ranks, 1):
        message = (
            f"is {value}, but one data-parallel rank has nobody to compare with: start more processes, or use null"
        )
        yield Problem(KEY, "unsupported", message)
