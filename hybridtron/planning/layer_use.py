"""What one sub-layer costs a device besides its weights: what it keeps, what it sends, what is carried of its states.

How tensor parallelism shares a state out, `StatePart` says; of the heads of keys and values a rank holds those that its
own query heads use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, StatePart
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.config.schema import Config, ParallelConfig, Recompute, StateMode
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES

INT64_BYTES = 8


@dataclass(frozen=True)
class LayerUse:
    """One sub-layer on one device, in values per token of the type that is computed in."""

    kept: int  # from the forward to the backward pass
    again: int  # while it is recomputed
    back: int  # that its backward pass has made at its most, with the stream's gradient, less what is gone by then
    summed: int  # over the tensor-parallel ranks, in forward and backward
    gathered: int = 0  # from these ranks once more, in backward
    away: int = 0  # that waits in the host's memory from the forward to the backward pass
    read: int = 0  # of what is kept: what the norm before it has made, if that is kept as it is
    twice: int = 0  # that it keeps as well, and that counts in the sub-layer that it is beside


def layer_uses(config: Config, runs_again: bool = False) -> tuple[LayerUse, ...]:
    """What each sub-layer keeps and sends, also where whole chunks of a lane run again in the backward pass."""
    arch = architecture(config.model)
    sizes = sizes_of(config)
    stream = stream_values(config)
    by_letter = {letter: _layer_use(spec, sizes, config, stream, runs_again) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def sizes_of(config: Config) -> ModelSizes:
    """Those of the model, for counting values of the type that is computed in."""
    return replace(architecture(config.model).sizes, wide=FP32_BYTES // VALUE_BYTES[config.precision.name])


def with_offload(uses: Sequence[LayerUse], count: int, received: int) -> tuple[LayerUse, ...]:
    """Of a stage's sub-layers the first ones leave what they keep to the host, less the stream that was received."""
    stays = [received, *[0] * len(uses)]
    away = [
        replace(use, kept=stay, away=use.kept + use.twice - stay)
        for use, stay in zip(uses[:count], stays, strict=False)
    ]
    return (*away, *uses[count:])


def is_recomputed(spec: MixerSpec, sizes: ModelSizes, recompute: Recompute) -> bool:
    """Whether the backward pass runs this sub-layer again; a mixer that looks along the sequence has a state."""
    return recompute == Recompute.layer or (recompute == Recompute.selective and bool(spec.state_parts(sizes)))


def passes_of(spec: MixerSpec, sizes: ModelSizes, recompute: Recompute, runs_again: bool) -> int:
    """Forward and backward through a sub-layer, for a micro-batch."""
    return 2 + is_recomputed(spec, sizes, recompute) + runs_again


def runs_again(phase: ResolvedPhase) -> bool:
    """Whether the chunks of a lane, run through time, run again in the backward pass, one at a time."""
    return phase.chunks_together > 1 and phase.config.parallel.recompute != Recompute.none


def carried_parts(phase: ResolvedPhase) -> dict[int, dict[str, StatePart]]:
    """What is carried of each sub-layer's state, or drawn for it; sub-layers of which nothing is are left out."""
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
    """Bytes of one lane's carried state on the fullest tensor-parallel rank, by sub-layer; noise is not carried."""
    if phase.states.mode in NOISE:
        return {}
    widths = {None: VALUE_BYTES[phase.precision.name], "float32": FP32_BYTES, "int64": INT64_BYTES}
    parallel = phase.config.parallel
    return {
        layer: sum(widths[part.dtype] * state_values(part, parallel) for part in parts.values())
        for layer, parts in carried_parts(phase).items()
    }


def state_values(part: StatePart, parallel: ParallelConfig) -> int:
    """Values that the fullest rank holds of one lane's state."""
    values = math.prod(length or 0 for length in part.shape)
    for cut in part.active_cuts(parallel.mesh_sizes):
        whole = sum(part.fused_sizes(cut.axis))
        values = values // whole * _most_held(cut, whole, parallel.mesh_sizes[cut.over])
    return values


def _most_held(cut: Cut, whole: int, ranks: int) -> int:
    """Of entries along an axis, how many the fullest rank holds."""
    if cut.readers is None:
        return whole // ranks
    readers_of_rank = cut.readers // ranks
    held = 0
    for first in range(0, cut.readers, readers_of_rank):
        used = [head * whole // cut.readers for head in range(first, first + readers_of_rank)]
        distinct = sorted(set(used))
        evenly = all(used.count(head) * len(distinct) == readers_of_rank for head in distinct)
        held = max(held, len(distinct) if evenly else readers_of_rank)
    return held


def hides_traffic(spec: MixerSpec, config: Config) -> bool:
    """Whether what ranks exchange for the gradient of a mixer's input is sent beside products (parallel/entered.py)."""
    own_products = not config.parallel.transformer_engine and config.precision.name not in FP8_MULTIPLES
    return config.parallel.tensor > 1 and spec.projects_input and own_products


def gathers_again(spec: MixerSpec, config: Config) -> bool:
    """Whether a mixer keeps its rank's share of the tokens that enter it, and gathers them again in backward."""
    return config.parallel.sequence and config.parallel.regather and hides_traffic(spec, config)


def _layer_use(spec: MixerSpec, sizes: ModelSizes, config: Config, stream: int, runs_again: bool) -> LayerUse:
    parallel = config.parallel
    regathers = gathers_again(spec, config)
    if parallel.tensor > 1:
        whole = spec.whole_values(sizes, parallel.tensor)
    else:
        whole = 0
    read = shared(spec.input_width(sizes), parallel.tensor if regathers else 1)
    inside = read + whole + shared(spec.activation_values(sizes) - whole, parallel.tensor)
    again = is_recomputed(spec, sizes, parallel.recompute)
    # of the row-parallel projections one writes to the stream; the others are summed inside the mixer
    rows = (
        sum(weight.shape[0] for weight in spec.parameters(sizes).values() if any(cut.axis == 1 for cut in weight.cuts))
        - sizes.width
    )
    passes = passes_of(spec, sizes, parallel.recompute, runs_again)
    # what the norm keeps: beside the stream also the embedding; nothing where there is none
    if spec.beside:
        own = 0
    else:
        own = stream * (2 if spec.feeds_next else 1)
    if parallel.tensor == 1 or not parallel.sequence or regathers:
        as_it_is = read
    else:
        as_it_is = 0
    if spec.beside:
        given = normed_values(config)
        there = as_it_is
    else:
        given = stream
        there = stream
    return LayerUse(
        kept=given if again else own + inside,
        again=own + inside - there if again else 0,
        back=max(own, stream) + shared(spec.backward_values(sizes), parallel.tensor),
        summed=passes * (sizes.width + rows) if parallel.tensor > 1 else 0,
        gathered=sizes.width if regathers else 0,
        read=given * spec.beside if again else as_it_is,
    )


def normed_values(config: Config) -> int:
    """Values per token of what a norm makes of the stream, on one device."""
    return shared(config.model.width, config.parallel.tensor if config.parallel.sequence else 1)


def stream_values(config: Config) -> int:
    """Values per token of the residual stream on one device; one in fp32 beside bf16 takes the place of two."""
    width = normed_values(config)
    if config.model.residual_fp32:
        return width * FP32_BYTES // VALUE_BYTES[config.precision.name]
    return width


def sent_values(config: Config) -> int:
    """Values per token that a stage sends on: the stream, and the embedding where later sub-layers read it."""
    return stream_values(config) * (2 if architecture(config.model).carries_embedding else 1)


def shared(amount: int, ranks: int) -> int:
    """What the fullest of `ranks` ranks gets."""
    return -(-amount // ranks)
