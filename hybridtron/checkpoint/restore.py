"""Resuming from a checkpoint, under any parallel layout.

All processes read the same checkpoint. If any process finds that the checkpoint is broken, all processes read the next
older checkpoint.

Within a phase of training the complete training state is restored. At the start of a phase, the model may have another
precision, other adapters or other frozen weights than the checkpoint. Then tensors in the checkpoint are loaded, and
all other tensors get their initial values.
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
from hybridtron.checkpoint.local import LocalCheckpoint
from hybridtron.checkpoint.local_identity import limit_stored
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.save import layout_of
from hybridtron.device import random_states, set_random_states
from hybridtron.engine.copied_weights import CopiedWeight, send_copies
from hybridtron.engine.engine import Engine
from hybridtron.engine.optimizer import AVERAGE
from hybridtron.engine.states import restore_states
from hybridtron.parallel.fp8_statistics import known_blocks
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError, Problem

__all__ = ["restore_newest", "restore_states", "verify_weights"]


@dataclass(frozen=True)
class PhaseBoundary:
    """A phase's start from a checkpoint.

    weights: the checkpoint to load weights and moments from; not always the checkpoint that the run resumes from
    moments: whether to load the optimizer's moments; otherwise they are set to zero
    key: the configuration key that names the checkpoint `weights`; None for the checkpoint that the run resumes from
    """

    weights: Checkpoint
    moments: bool
    key: str | None = None


@dataclass(frozen=True)
class RestoreFault:
    """A checkpoint's fault: `what` is a message for the user.

    `key` is the configuration key that names the checkpoint, or None for a checkpoint that the run found by itself.
    """

    what: str
    key: str | None = None


def restore_newest(
    candidates: Iterable[Checkpoint],
    engine_for: Callable[[Checkpoint], tuple[Engine, PhaseBoundary | None]],
    run_dir: Path,
) -> Checkpoint:
    """Restore weights, optimizer and random states from the first valid candidate; return this candidate.

    `engine_for` returns the engine to read a candidate into: candidates of different phases need different engines.
    Each process verifies the bytes that it reads. All processes continue once all of them have read the candidate.
    A weight that data-parallel ranks hold alike is read by one of them, which sends it to the others.

    A broken candidate in the run's own folder is archived (renamed), and the next candidate is tried. A broken
    checkpoint in another folder is not renamed: ConfigError is raised. Raises BrokenCheckpoint if no candidate is
    valid. Then the next start uses only older local checkpoints, so that it does not fail in the same way.
    """
    faults = []
    rejected: tuple[LocalCheckpoint, Groups] | None = None
    for checkpoint in candidates:
        engine, boundary = engine_for(checkpoint)
        if isinstance(checkpoint, LocalCheckpoint):
            copied = []  # a local checkpoint has all weights of the node's ranks
        else:
            copied = engine.copied_weights()
        fault = _first_fault(_restore(checkpoint, engine, boundary, copied), engine.groups)
        if fault is None:
            send_copies(copied)  # only after all ranks have read their parts, so that no rank waits for one that failed
            _archive_newer_broken(checkpoint, run_dir, engine.groups.is_first)
            return checkpoint
        if isinstance(checkpoint, LocalCheckpoint):
            faults.append(fault.what)
            rejected = (checkpoint, engine.groups)
            if engine.groups.is_first:
                print(f"LOCAL CHECKPOINT: not used: {fault.what}", file=sys.stderr)
            continue
        if fault.key is None and not belongs_to(run_dir, checkpoint.folder):
            fault = RestoreFault(fault.what, "run.resume")
        if fault.key is not None:
            raise ConfigError(
                [Problem(fault.key, "unreadable", f"{fault.what}; set {fault.key} to another checkpoint")]
            )
        faults.append(fault.what)
        if engine.groups.is_first:
            print(f"BROKEN CHECKPOINT: {fault.what}; {archive_broken(checkpoint.folder)}", file=sys.stderr)
        engine.groups.control.barrier()
    if rejected is not None:
        faults.append(_reject(*rejected, run_dir))
    raise BrokenCheckpoint("; ".join(["no checkpoint is valid", *faults]))


def _reject(checkpoint: LocalCheckpoint, groups: Groups, run_dir: Path) -> str:
    """Let no later start use a local checkpoint, or newer ones that were written before; return a message."""
    newest = checkpoint.meta.step - 1
    groups.control.once(lambda: limit_stored(run_dir, newest))
    return f"start again: the next start uses no local checkpoint after step {newest}"


def _first_fault(fault: RestoreFault | None, groups: Groups) -> RestoreFault | None:
    """Gather the faults that the ranks found; return the fault of the lowest rank, or None if no rank found a fault."""
    faults = groups.control.all_gather(None if fault is None else [fault.what, fault.key])
    first = next(filter(None, faults), None)
    if first is None:
        return None
    return RestoreFault(what=first[0], key=first[1])


def verify_weights(weights: Checkpoint, groups: Groups, key: str) -> None:
    """Verify the weights and masters of a checkpoint that a configuration key names.

    Raises ConfigError if they are not valid. All processes call this together, and each verifies a part.
    """
    fault = None
    try:
        weights.verify_weights(groups.rank, groups.world_size)
    except BrokenCheckpoint as error:
        fault = str(error)
    if first_fault := next(filter(None, groups.control.all_gather(fault)), None):
        raise ConfigError([Problem(key, "unreadable", f"{first_fault}; set {key} to another checkpoint")])


def _archive_newer_broken(checkpoint: Checkpoint, run_dir: Path, is_first_rank: bool) -> None:
    """Archive the broken checkpoints of later steps, so that the next start of the run need not skip them again."""
    if is_first_rank and belongs_to(run_dir, checkpoint.folder):
        for line in archive_newer_broken(run_dir, checkpoint.meta.step):
            print(line, file=sys.stderr)


def _restore(
    checkpoint: Checkpoint, engine: Engine, boundary: PhaseBoundary | None, copied: Sequence[CopiedWeight]
) -> RestoreFault | None:
    """Read a checkpoint into an engine; return the fault that this process finds, or None.

    The recurrent states are only verified here. Of the weights in `copied`, only this process's are read.
    """
    try:
        groups = engine.groups
        elsewhere = {key for weight in copied if not weight.is_reader for key in weight.keys}
        blocks = engine.blocks()
        blocks["model"] = [block for block in blocks["model"] if block.key not in elsewhere]
        for name in list(checkpoint.manifest.files)[groups.rank :: groups.world_size]:
            checkpoint.verified(name)  # also files that are not read here, such as the tokenizer
        checkpoint.verify_chunks("states", groups.rank, groups.world_size)  # loaded later, by `restore_states`
        if boundary is None:
            _fill(checkpoint, [*blocks["model"], *blocks["optimizer"]])
        elif fault := _load_phase_start(boundary, blocks):
            return fault
        checkpoint.fill(known_blocks(blocks["fp8"], checkpoint.shapes))
        same_layout = checkpoint.meta.layout == layout_of(engine.config, engine.groups)
        # Under another layout than the checkpoint's, a rank's number has another meaning. So all ranks then load the
        # random states of rank 0.
        rank = engine.groups.rank if same_layout else 0
        set_random_states({name: checkpoint.whole(f"random.{rank}.{name}") for name in random_states()})
    except BrokenCheckpoint as error:
        return RestoreFault(str(error))
    engine.optimizer.resume(checkpoint.meta.accepted_steps if boundary is None or boundary.moments else 0)
    engine.guard.restart(checkpoint.meta.norms, checkpoint.meta.refused)
    return None


def _fill(checkpoint: Checkpoint, blocks: Sequence[Any]) -> None:
    """Read blocks (shards of tensors) from a checkpoint, in place.

    Raises BrokenCheckpoint if a block is missing or damaged, or contains NaN or infinity.
    """
    checkpoint.fill(blocks)
    if key := not_finite(blocks):
        raise BrokenCheckpoint(f"{checkpoint.folder}: {key} contains NaN or infinity", code="out-of-range")


def _load_phase_start(boundary: PhaseBoundary, blocks: Mapping[str, list[Any]]) -> RestoreFault | None:
    """Load the tensors that a new phase starts from; return the checkpoint's fault, or None.

    - A weight in another dtype than bf16 is read from its fp32 master, or from the weight if there is no master.
    - A master that the checkpoint lacks is read from the weight.
    - A moving average that the checkpoint lacks starts as the weight. If moments are set to zero, every moving average
      starts as the weight.
    - Moments are set to zero if the checkpoint lacks them or if `boundary.moments` is False.
    - Adapters that the checkpoint lacks keep their initial values, and so do their masters.
    """
    stored_shapes = boundary.weights.shapes
    wanted = []

    def begins(key: str) -> bool:
        return is_adapter(key) and key not in stored_shapes  # a new adapter, which keeps its initial values

    for block in blocks["model"]:
        if begins(block.key):
            continue
        master = f"master.{block.key}"
        wanted.append(
            replace(block, key=master) if block.data.dtype != torch.bfloat16 and master in stored_shapes else block
        )
    for block in blocks["optimizer"]:
        kind, _, weight = block.key.partition(".")
        if kind in ("master", AVERAGE) and begins(weight):
            continue
        if kind == "master":
            wanted.append(block if block.key in stored_shapes else replace(block, key=weight))
        elif kind == AVERAGE and not (boundary.moments and block.key in stored_shapes):
            wanted.append(replace(block, key=boundary.weights.widest(weight)))
        elif boundary.moments and block.key in stored_shapes:
            wanted.append(block)
        else:
            block.data.zero_()
    try:
        _fill(boundary.weights, wanted)
    except BrokenCheckpoint as error:
        return RestoreFault(str(error), boundary.key)
    return None
