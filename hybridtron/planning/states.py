"""States that rows carry from one to the next: which parts of which sub-layers, and their bytes on one device.

`StatePart` says how tensor-parallel ranks share a state out. Of the heads of keys and values a rank holds those that
its own query heads read.
"""

from __future__ import annotations

import math

from hybridtron.architecture.base import Cut, StatePart, groups_of_heads
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.config.schema import ParallelConfig, StateMode
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES

INT64_BYTES = 8


def carried_parts(phase: ResolvedPhase) -> dict[int, dict[str, StatePart]]:
    """Return the carried or drawn parts of each sub-layer's state; sub-layers with none are left out."""
    states = phase.states
    if states.mode is StateMode.zero:
        return {}
    arch = architecture(phase.model)
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
    """Return the bytes of one lane's carried state on the fullest tensor-parallel rank, by sub-layer.

    Noise is drawn and not carried.
    """
    if phase.states.mode in NOISE:
        return {}
    return {
        layer: sum(part_bytes(part, phase) for part in parts.values()) for layer, parts in carried_parts(phase).items()
    }


def part_bytes(part: StatePart, phase: ResolvedPhase) -> int:
    """Return the bytes that the fullest rank holds of one lane's state part."""
    value_bytes = {None: VALUE_BYTES[phase.precision.name], "float32": FP32_BYTES, "int64": INT64_BYTES}[part.dtype]
    return value_bytes * state_values(part, phase.config.parallel)


def state_values(part: StatePart, parallel: ParallelConfig) -> int:
    """Return the values that the fullest rank holds of one lane's state part."""
    values = math.prod(length or 0 for length in part.shape)
    for cut in part.active_cuts(parallel.mesh_sizes):
        whole = sum(part.fused_sizes(cut.axis))
        values = values // whole * _most_held(cut, whole, parallel.mesh_sizes[cut.over])
    return values


def _most_held(cut: Cut, whole: int, ranks: int) -> int:
    """Return how many of the entries along an axis the fullest rank holds."""
    if cut.readers is None:
        return whole // ranks
    share = cut.readers // ranks
    most = 0
    for first in range(0, cut.readers, share):
        used = groups_of_heads(range(first, first + share), cut.readers, whole)
        most = max(most, used.stop - used.start if isinstance(used, slice) else len(used))
    return most
