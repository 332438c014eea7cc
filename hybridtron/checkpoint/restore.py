"""Going on from a checkpoint, on any layout: all processes from the same one, or from an older one if it is broken."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import put_aside
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.save import layout_of
from hybridtron.device import random_states, set_random_states
from hybridtron.engine.engine import Engine
from hybridtron.engine.stored_states import restore_states
from hybridtron.parallel.fp8_statistics import known_blocks
from hybridtron.parallel.groups import barrier, everyone

__all__ = ["restore_newest", "restore_states"]


def restore_newest(candidates: Iterable[Checkpoint], engine: Engine) -> Checkpoint:
    """Weights, optimizer and random states of the first candidate that is whole; broken ones are put aside.

    Every byte is verified as it is read, by the process that reads it, and no process goes on before all have read.
    """
    found = []
    for checkpoint in candidates:
        fault = next(filter(None, everyone(_restored(checkpoint, engine))), None)
        if fault is None:
            return checkpoint
        found.append(fault)
        if engine.groups.is_first:
            print(f"BROKEN CHECKPOINT: {fault}; {put_aside(checkpoint.folder)}", file=sys.stderr)
        barrier()
    raise BrokenCheckpoint("; ".join(["no checkpoint is whole", *found]))


def _restored(checkpoint: Checkpoint, engine: Engine) -> str | None:
    """Read everything but the carried states; what is wrong with it."""
    try:
        groups, blocks = engine.groups, engine.blocks()
        for name in list(checkpoint.manifest.files)[groups.rank :: groups.world_size]:
            checkpoint.verified(name)  # what is not needed here is needed by others: the tokenizer, files' heads
        checkpoint.verify_chunks("states", groups.rank, groups.world_size)  # they are read when their phase starts
        checkpoint.fill(blocks["model"])
        checkpoint.fill(blocks["optimizer"])
        checkpoint.fill(known_blocks(blocks["fp8"], checkpoint.shapes))
        same_layout = checkpoint.meta.layout == layout_of(engine.config, engine.groups)
        rank = engine.groups.rank if same_layout else 0
        set_random_states({name: checkpoint.whole(f"random.{rank}.{name}") for name in random_states()})
    except BrokenCheckpoint as error:
        return str(error)
    engine.optimizer.resume(checkpoint.meta.accepted_steps)
    engine.guard.restart(checkpoint.meta.norms, checkpoint.meta.refused)
    return None
