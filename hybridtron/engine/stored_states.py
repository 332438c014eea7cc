"""Carried states as blocks of full tensors, over all lanes and heads, so that any layout can resume from them.

    held.LAYER.PART     (lanes, ...)     the lanes' last states
    moments.LAYER       (2, heads)       mean and variance to which noise is fitted
    restarts            ()               number of lanes restarted since the phase began, as their state was not finite

Blocks are views, so that a restore fills the carrier's tensors in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hybridtron.architecture.base import StatePart
from hybridtron.engine.states import Carrier
from hybridtron.parallel.blocks import block, lane_blocks
from hybridtron.parallel.cut import held_runs
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError, Problem


class Stored(Protocol):
    """Interface of a checkpoint's stored tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def dtype(self, key: str, /) -> torch.dtype: ...
    def fill(self, blocks: Sequence[Any], /) -> None: ...


def state_blocks(carrier: Carrier, groups: Groups) -> list[Any]:
    """Return this rank's blocks of all carried state."""
    blocks = []
    for layer, name, part in _parts(carrier):
        if layer in carrier.held:
            state = carrier.held[layer][name]
            key = f"held.{layer}.{name}"
            blocks += lane_blocks(key, state, part, carrier.lanes, carrier.all_lanes, groups.states)
        if layer in carrier.moments:
            moments = carrier.moments[layer]
            first = groups.dense.copies.rank == 0
            tensor = groups.tensor.rank
            if part.heads == 1:
                offset = (0, 0)
                main = first and tensor == 0
            else:
                offset = (0, tensor * moments.shape[1])
                main = first
            blocks.append(block(f"moments.{layer}", (2, part.heads), offset, moments, main))
    return [*blocks, block("restarts", (), (), carrier.restarts, groups.is_first)]


def restore_states(carrier: Carrier, groups: Groups, stored: Stored) -> None:
    """Resume from stored states, written under any layout.

    Raises ConfigError if the checkpoint lacks them or has another number of lanes.
    """
    shapes = stored.shapes
    if "restarts" not in shapes:
        raise ConfigError([_unlike("carries states, but the checkpoint was written without them")])
    has_states = any(key.startswith("held.") for key in shapes)  # False if no step had been accepted
    for layer, name, part in _parts(carrier):
        key = f"held.{layer}.{name}"
        if carrier.holds and has_states:
            if key not in shapes:
                raise ConfigError([_unlike(f"carries {name} of sub-layer {layer}, of which the checkpoint has none")])
            if shapes[key][0] != carrier.all_lanes:
                lanes = f"has {carrier.all_lanes} lanes, but the checkpoint holds the states of {shapes[key][0]}"
                raise ConfigError([_unlike(lanes)])
            shape = [len(carrier.lanes), *shapes[key][1:]]
            for cut in part.active_cuts(groups.states.sizes):
                shape[1 + cut.axis] = sum(map(len, held_runs(part, cut, groups.states.dimensions[cut.over])))
            state = torch.empty(shape, dtype=stored.dtype(key), device=carrier.device)
            carrier.held.setdefault(layer, {})[name] = state
        elif f"moments.{layer}" in shapes:
            if part.heads > 1:
                heads = part.heads // groups.tensor.size
            else:
                heads = 1
            carrier.moments[layer] = torch.empty(2, heads, dtype=torch.float64, device=carrier.device)
    carrier.restarts = torch.empty((), dtype=torch.int64, device=carrier.device)
    stored.fill(state_blocks(carrier, groups))


def _parts(carrier: Carrier) -> list[tuple[int, str, StatePart]]:
    """List the carried parts on this rank as (layer, name, part)."""
    return [
        (layer, name, part)
        for layers in carrier.chunks
        for layer, parts in layers.items()
        for name, part in parts.items()
    ]


def _unlike(what: str) -> Problem:
    return Problem(
        "states.mode", "changed", f"{what}; set it back for this phase, or start from scratch with run.resume=never"
    )
