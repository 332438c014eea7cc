"""Rules for `run.cuda_graph`: the settings for which a rehearsal shows that a CUDA graph can repeat a micro-batch.

`hybridtron rehearse --capture` is this proof. It covers models on a single rank, without carried states, and with the
mixers of Samba and Mamba-2. This file does not import torch; `engine/engine.py` refuses a CPU when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridtron.architecture.sparse import RecurrenceSpec
from hybridtron.config.choices import FP8_MULTIPLES, StateMode
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.problems import Problem

KINDS = ("attention", "mamba", "mamba2", "swiglu")
KEY = "run.cuda_graph"


def graph_problems(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """List all reasons why the passes of a phase's micro-batches can't be in a CUDA graph."""
    config = phase.config
    if not config.run.cuda_graph:
        return
    parallel = config.parallel
    alone = {
        "parallel.tensor=1": parallel.tensor == 1,
        "parallel.pipeline=1": parallel.pipeline == 1,
        "parallel.context=1": parallel.context == 1,
        "parallel.offload=0": parallel.offload == 0,
        "parallel.transformer_engine=false": not parallel.transformer_engine,
        "run.compile=false": not config.run.compile,
        "precision=bf16": phase.precision.name not in FP8_MULTIPLES,
        "states.mode=zero": phase.states.mode is StateMode.zero,
    }
    if needed := [setting for setting, holds in alone.items() if not holds]:
        yield Problem(KEY, "needs-other-key", f"is true, but needs {' and '.join(needed)}: set these, or use false")
    # with overlap, every replay would reduce gradients; only a step's last micro-batch may
    several = world_size is not None and world_size > max(parallel.model_ranks, 1)
    if parallel.overlap_grad_reduce or (several and parallel.overlap_grad_reduce is None):
        message = "is true, but needs parallel.overlap_grad_reduce=false: set it, or use false"
        yield Problem(KEY, "needs-other-key", message)
    if phase.parsed is not None:
        yield from _mixers(phase)


def _mixers(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report sub-layers whose kind is not in KINDS, and recurrences with sparse attention."""
    unproven = []
    for letter, spec in phase.arch.by_letter.items():
        if spec.kind not in KINDS:
            unproven.append(f"{letter} ({spec.kind})")
        elif isinstance(spec, RecurrenceSpec) and spec.sparse is not None:
            unproven.append(f"{letter} ({spec.kind} with sparse)")
    if unproven:
        proven = ", ".join(KINDS)
        has = f"is true, but model.pattern has {', '.join(unproven)}"
        yield Problem(KEY, "unsupported", f"{has}, and graphs are possible only for {proven}: use false")
