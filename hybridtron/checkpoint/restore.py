"""Resuming from a checkpoint, on any layout: all processes from the same one, or from an older one if it is broken.

Within a phase everything is as it was. Where a phase begins, the model may be used in another way, in another
precision, with other weights learning: what fits is loaded, what was not there before starts from scratch.
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
    """That a phase begins where a checkpoint ends: with the weights of this one, with the moments or without."""

    weights: Checkpoint
    moments: bool
    key: str | None = None  # of the configuration, where it names these weights; else they are the checkpoint's own


@dataclass(frozen=True)
class RestoreFault:
    """What is wrong with a checkpoint, and the key that names it where it is not the one to resume from."""

    what: str
    key: str | None = None


def restore_newest(
    candidates: Iterable[Checkpoint], engine_for: Callable[[Checkpoint], tuple[Engine, Border | None]], run_dir: Path
) -> Checkpoint:
    """Weights, optimizer and random states of the first candidate that is whole; a run's own broken ones are renamed.

    They are read into the engine that resumes from this candidate, which may be of an earlier phase than a broken one.
    Every byte is verified as it is read, by the process that reads it, and no process continues before all have read.
    A broken one that belongs to another run is left as it is, and ends this one: a key of the configuration names it.
    """
    found = []
    for checkpoint in candidates:
        engine, border = engine_for(checkpoint)
        fault = _first_fault(_restored(checkpoint, engine, border))
        if fault is None:
            _archive_newer_broken(checkpoint, run_dir, engine.groups.is_first)
            return checkpoint
        if fault.key is None and not belongs_to(run_dir, checkpoint.folder):
            fault = RestoreFault(fault.what, "run.resume")
        if fault.key is not None:
            raise ConfigError([Problem(fault.key, f"{fault.what}; name another checkpoint")])
        found.append(fault.what)
        if engine.groups.is_first:
            print(f"BROKEN CHECKPOINT: {fault.what}; {archive_broken(checkpoint.folder)}", file=sys.stderr)
        barrier()
    raise BrokenCheckpoint("; ".join(["no checkpoint is whole", *found]))


def _first_fault(own: RestoreFault | None) -> RestoreFault | None:
    """The fault of the first process that has one, on all of them."""
    every = all_gather_values(None if own is None else [own.what, own.key])
    first = next(filter(None, every), None)
    return None if first is None else RestoreFault(what=first[0], key=first[1])


def check_given(given: Checkpoint, groups: Groups, key: str) -> None:
    """All processes together read the weights that a key names. Raises ConfigError where they are not whole."""
    fault = None
    try:
        given.verify_chunks("model", groups.rank, groups.world_size)
    except BrokenCheckpoint as error:
        fault = str(error)
    if found := next(filter(None, all_gather_values(fault)), None):
        raise ConfigError([Problem(key, f"{found}; name another checkpoint")])


def _archive_newer_broken(checkpoint: Checkpoint, run_dir: Path, first: bool) -> None:
    """Those that were skipped would be skipped at each start, and take the place of one that is kept."""
    if first and belongs_to(run_dir, checkpoint.folder):
        for line in archive_newer_broken(run_dir, checkpoint.meta.step):
            print(line, file=sys.stderr)


def _restored(checkpoint: Checkpoint, engine: Engine, border: Border | None) -> RestoreFault | None:
    """Read everything but the carried states; what is wrong with it."""
    try:
        groups, blocks = engine.groups, engine.blocks()
        for name in list(checkpoint.manifest.files)[groups.rank :: groups.world_size]:
            checkpoint.verified(name)  # what is not needed here is needed by others: the tokenizer, files' heads
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
    """Read what blocks stand for; a number that is none would be trained on."""
    checkpoint.fill(blocks)
    if key := not_finite(blocks):
        raise BrokenCheckpoint(f"{checkpoint.folder} holds values of {key} that are not finite")


def _taken_over(border: Border, blocks: Mapping[str, list[Any]]) -> RestoreFault | None:
    """Read weights in full precision where they are kept so, and the moments of weights that learned before."""
    held, wanted = border.weights.shapes, []

    def begins(key: str) -> bool:
        return is_adapter(key) and key not in held  # it is as the engine has made it

    for one in blocks["model"]:
        if begins(one.key):
            continue
        master = f"master.{one.key}"
        wanted.append(replace(one, key=master) if one.data.dtype != torch.bfloat16 and master in held else one)
    for one in blocks["optimizer"]:
        kind, _, weight = one.key.partition(".")
        if kind == "master" and begins(weight):
            continue
        if kind == "master":
            wanted.append(one if one.key in held else replace(one, key=weight))
        elif border.moments and one.key in held:
            wanted.append(one)
        else:
            one.data.zero_()
    try:
        _fill(border.weights, wanted)
    except BrokenCheckpoint as error:
        return RestoreFault(str(error), border.key)
    return None
