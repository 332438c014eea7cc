"""Resuming from a checkpoint, on any layout.

All processes read the same checkpoint; if it is broken, all fall back to the next older one. Within a phase the
complete training state is restored. A new phase may have another precision, other adapters or other trained weights:
tensors that fit are loaded, and the rest starts from scratch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridtron.architecture.adapters import is_adapter
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.finite import not_finite
from hybridtron.checkpoint.folder import archive_broken, archive_newer_broken, belongs_to
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.save import layout_of
from hybridtron.device import random_states, set_random_states
from hybridtron.engine.engine import Engine
from hybridtron.engine.stored_states import restore_states
from hybridtron.parallel.fp8_statistics import known_blocks
from hybridtron.parallel.groups import Groups, barrier
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.problems import ConfigError, Problem

__all__ = ["check_given", "restore_newest", "restore_states"]


@dataclass(frozen=True)
class Border:
    """A phase's start from a checkpoint: the weights to load, and whether moments are kept.

    `weights` may be another checkpoint than the one that the run resumes from; `key` is then the configuration key that
    names it.
    """

    weights: Checkpoint
    moments: bool
    key: str | None = None  # None if the weights are those of the checkpoint that the run resumes from


@dataclass(frozen=True)
class RestoreFault:
    """A checkpoint's fault, as a message for the user.

    `key` is the configuration key that names the checkpoint, or None if it is one that the run wrote itself.
    """

    what: str
    key: str | None = None


def restore_newest(
    candidates: Iterable[Checkpoint], engine_for: Callable[[Checkpoint], tuple[Engine, Border | None]], run_dir: Path
) -> Checkpoint:
    """Restore weights, optimizer and random states from the first valid candidate, and return that candidate.

    `engine_for` returns the engine to read a candidate into: a broken candidate may belong to a later phase than a
    valid one. Every byte is verified by the process that reads it, and no process continues before all have read
    theirs.

    Broken checkpoints in the run's own folder are archived. A broken one that a configuration key names may belong to
    another run; it is left as it is, and ConfigError is raised. Raises BrokenCheckpoint if no candidate is valid.
    """
    faults = []
    for checkpoint in candidates:
        engine, border = engine_for(checkpoint)
        fault = _first_fault(_restored(checkpoint, engine, border))
        if fault is None:
            _archive_newer_broken(checkpoint, run_dir, engine.groups.is_first)
            return checkpoint
        if fault.key is None and not belongs_to(run_dir, checkpoint.folder):
            fault = RestoreFault(fault.what, "run.resume")
        if fault.key is not None:
            raise ConfigError([Problem(fault.key, "unreadable", f"{fault.what}; name another checkpoint")])
        faults.append(fault.what)
        if engine.groups.is_first:
            print(f"BROKEN CHECKPOINT: {fault.what}; {archive_broken(checkpoint.folder)}", file=sys.stderr)
        barrier()
    raise BrokenCheckpoint("; ".join(["no checkpoint is whole", *faults]))


def _first_fault(own: RestoreFault | None) -> RestoreFault | None:
    """Return, on all processes, the fault that the lowest rank with a fault has found; None if there is none."""
    every = all_gather_values(None if own is None else [own.what, own.key])
    first = next(filter(None, every), None)
    if first is None:
        return None
    return RestoreFault(what=first[0], key=first[1])


def check_given(given: Checkpoint, groups: Groups, key: str) -> None:
    """Verify the weights that a configuration key names. Raises ConfigError if they are not valid.

    All processes call this together and share the reading.
    """
    fault = None
    try:
        given.verify_chunks("model", groups.rank, groups.world_size)
    except BrokenCheckpoint as error:
        fault = str(error)
    if first_fault := next(filter(None, all_gather_values(fault)), None):
        raise ConfigError([Problem(key, "unreadable", f"{first_fault}; name another checkpoint")])


def _archive_newer_broken(checkpoint: Checkpoint, run_dir: Path, first: bool) -> None:
    """Archive the broken later checkpoints, so that the next start need not skip them again."""
    if first and belongs_to(run_dir, checkpoint.folder):
        for line in archive_newer_broken(run_dir, checkpoint.meta.step):
            print(line, file=sys.stderr)


def _restored(checkpoint: Checkpoint, engine: Engine, border: Border | None) -> RestoreFault | None:
    """Read everything except the carried states into an engine; return the fault that this process finds, or None."""
    try:
        groups = engine.groups
        blocks = engine.blocks()
        for name in list(checkpoint.manifest.files)[groups.rank :: groups.world_size]:
            checkpoint.verified(name)  # files that are not read here must be valid too: the tokenizer, the heads
        checkpoint.verify_chunks("states", groups.rank, groups.world_size)  # they are read when their phase starts
        if border is None:
            _fill(checkpoint, [*blocks["model"], *blocks["optimizer"]])
        elif fault := _taken_over(border, blocks):
            return fault
        checkpoint.fill(known_blocks(blocks["fp8"], checkpoint.shapes))
        same_layout = checkpoint.meta.layout == layout_of(engine.config, engine.groups)
        rank = engine.groups.rank if same_layout else 0
        set_random_states({name: checkpoint.whole(f"random.{rank}.{name}") for name in random_states()})
    except BrokenCheckpoint as error:
        return RestoreFault(str(error))
    engine.optimizer.resume(checkpoint.meta.accepted_steps if border is None or border.moments else 0)
    engine.guard.restart(checkpoint.meta.norms, checkpoint.meta.refused)
    return None


def _fill(checkpoint: Checkpoint, blocks: Sequence[Any]) -> None:
    """Read blocks from a checkpoint. Raises BrokenCheckpoint if any holds NaN or infinity."""
    checkpoint.fill(blocks)
    if key := not_finite(blocks):
        raise BrokenCheckpoint(f"{checkpoint.folder} holds values of {key} that are not finite")


def _taken_over(border: Border, blocks: Mapping[str, list[Any]]) -> RestoreFault | None:
    """Load the weights, and perhaps the moments, that a new phase starts from; return the fault, or None.

    A weight that is not bf16 in this phase is read from its fp32 master where the checkpoint has one, and a master that
    it lacks is read from the weight. Moments that it lacks, or that are not kept, are zero. Adapters that it lacks keep
    their initial values.
    """
    stored_shapes = border.weights.shapes
    wanted = []

    def begins(key: str) -> bool:
        return is_adapter(key) and key not in stored_shapes  # the engine has initialized it

    for block in blocks["model"]:
        if begins(block.key):
            continue
        master = f"master.{block.key}"
        wanted.append(
            replace(block, key=master) if block.data.dtype != torch.bfloat16 and master in stored_shapes else block
        )
    for block in blocks["optimizer"]:
        kind, _, weight = block.key.partition(".")
        if kind == "master" and begins(weight):
            continue
        if kind == "master":
            wanted.append(block if block.key in stored_shapes else replace(block, key=weight))
        elif border.moments and block.key in stored_shapes:
            wanted.append(block)
        else:
            block.data.zero_()
    try:
        _fill(border.weights, wanted)
    except BrokenCheckpoint as error:
        return RestoreFault(str(error), border.key)
    return None
