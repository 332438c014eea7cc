"""Parts and sizes of the states that training carries from a row to the next row in the same lane.

A lane is one row index in the batch. A state is all that a layer needs from previous tokens: a recurrent state, a
convolution's last inputs, or keys and values. `StatePart` describes how tensor-parallel ranks divide a state. A rank
holds the key and value heads that its own query heads read, so one rank may hold more heads than another rank.
"""

from __future__ import annotations

import math

from hybridtron.architecture.base import Cut, StatePart, groups_of_heads
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.config.schema import ParallelConfig, StateMode
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES

INT64_BYTES = 8


def carried_parts(phase: ResolvedPhase) -> dict[int, dict[str, StatePart]]:
    """Return, for each sub-layer, the parts of its initial state that are carried from row to row or drawn at random.

    The result is sub-layer index -> part name -> part. Sub-layers without such parts are left out.
    """
    states = phase.states
    if states.mode is StateMode.zero:
        return {}
    arch = phase.arch
    kinds = phase.carried_kinds
    if states.layers is None:
        layers = range(len(arch.specs))
    else:
        layers = sorted(set(states.layers))
    parts = {
        layer: {name: part for name, part in arch.specs[layer].state_parts(arch.sizes).items() if part.kind in kinds}
        for layer in layers
    }
    return {layer: of_layer for layer, of_layer in parts.items() if of_layer}


def carried_bytes(phase: ResolvedPhase) -> dict[int, int]:
    """Return, for each sub-layer, the bytes of one lane's carried state on the tensor-parallel rank with most bytes.

    States that are drawn at random are not carried, and take no memory.
    """
    if phase.states.mode in NOISE:
        return {}
    return {
        layer: sum(part_bytes(part, phase) for part in parts.values()) for layer, parts in carried_parts(phase).items()
    }


def part_bytes(part: StatePart, phase: ResolvedPhase) -> int:
    """Return the most bytes that one lane's state part takes on any tensor-parallel rank."""
    value_bytes = {None: VALUE_BYTES[phase.precision.name], "float32": FP32_BYTES, "int64": INT64_BYTES}[part.dtype]
    return value_bytes * state_values(part, phase.config.parallel)


def state_values(part: StatePart, parallel: ParallelConfig) -> int:
    """Return the most elements that one lane's state part has on any tensor-parallel rank."""
    values = math.prod(length or 0 for length in part.shape)
    for cut in part.active_cuts(parallel.mesh_sizes):
        whole = sum(part.fused_sizes(cut.axis))
        values = values // whole * _most_held(cut, whole, parallel.mesh_sizes[cut.over])
    return values


def _most_held(cut: Cut, whole: int, ranks: int) -> int:
    """Return a shard's maximum length over all ranks, for an axis with length `whole` that is divided by `cut`.

    `cut.readers` is the number of query heads that read the heads along the axis; None if ranks divide the axis evenly.
    """
    if cut.readers is None:
        return whole // ranks
    share = cut.readers // ranks
    most = 0
    for first in range(0, cut.readers, share):
        used = groups_of_heads(range(first, first + share), cut.readers, whole)
        most = max(most, used.stop - used.start if isinstance(used, slice) else len(used))
    return most
