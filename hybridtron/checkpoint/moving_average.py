"""Reads a checkpoint's moving average (`run.ema`) in place of its weights.

Weights without an average are read as they are: weights that the phase has frozen, and corrections of routers with
`balance: bias`. The optimizer does not train a correction, so it has no average although steps move it. It is read with
its last value, beside a router that is an average.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtron.checkpoint.checkpoint import MASTER, Checkpoint
from hybridtron.engine.optimizer import AVERAGE
from hybridtron.problems import Unusable

PREFIX = f"{AVERAGE}."  # prefix of averages' keys, in front of the weight's key


def averaged_weights(checkpoint: Checkpoint) -> set[str]:
    """Return the keys of the weights that have a moving average in a checkpoint."""
    return {key.removeprefix(PREFIX) for key in checkpoint.shapes if key.startswith(PREFIX)}


def moving_average(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view of a checkpoint in which each averaged weight is the average, in fp32. No tensor is read here.

    Raises Unusable if the checkpoint has no average.
    """
    averaged = averaged_weights(checkpoint)
    if not averaged:
        raise Unusable(
            f"{checkpoint.folder} has no moving average: leave out --ema, or name a checkpoint of a run with run.ema",
            code="missing",
        )
    replaced = averaged | {f"{MASTER}{key}" for key in averaged}
    chunks = [
        chunk._replace(key=chunk.key.removeprefix(PREFIX))
        for chunk in checkpoint.manifest.chunks
        if chunk.key not in replaced
    ]
    return Checkpoint(checkpoint.folder, replace(checkpoint.manifest, chunks=tuple(chunks)))
