"""What sub-layers keep where Transformer Engine multiplies in FP8, beside what they would keep in bf16.

an input          of each product is kept in FP8, a byte a value, once for every product that reads it; as bf16 it is
                  gone, unless an op keeps it for itself (`keeps_output`) or a product in bf16 reads it too
a weight          is kept in FP8 too, by every micro-batch, unless `precision.cache_weights` keeps it for a step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.layout import fp8_layers
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.count import VALUE_BYTES
from hybridtron.planning.layer_use import LayerUse, shared
from hybridtron.planning.pipeline import local_size
from hybridtron.planning.projections import projections_of


def with_fp8(uses: Sequence[LayerUse], phase: ResolvedPhase, table: Mapping[str, Parameter]) -> tuple[LayerUse, ...]:
    """All sub-layers of a model, of which `with_frozen` has said what they keep in bf16."""
    config = phase.config
    if config.precision.name not in FP8_MULTIPLES or config.precision.emulate:
        return tuple(uses)
    layers = fp8_layers(config)
    return tuple(_in_fp8(use, phase, table, layer) if layer in layers else use for layer, use in enumerate(uses))


def _in_fp8(use: LayerUse, phase: ResolvedPhase, table: Mapping[str, Parameter], layer: int) -> LayerUse:
    arch = architecture(phase.model)
    config = phase.config
    value = VALUE_BYTES[phase.precision.name]
    spec = arch.specs[layer]
    width = phase.model.width
    found = projections_of(phase, table, layer)
    reading = [one for one in found.entering if one.keeps_input]
    more = width * sum(one.weight.fp8 and one.learns for one in reading) // value
    if gone := bool(reading) and all(one.weight.fp8 and one.adapter is None for one in reading):
        more -= width
    for one in found.leaving:
        own = shared(one.weight.shape[1], config.parallel.tensor)
        in_bf16 = spec.keeps_output or one.adapter is not None or not one.learns
        more += own // value * one.learns - (0 if in_bf16 else own)
    if not config.precision.cache_weights:  # micro-batches share nothing, the tokens of one share a weight
        rounded = sum(local_size(one.weight, config.parallel) for one in found.every if one.weight.fp8)
        more += rounded // (value * phase.tokens_of_rank)
    if use.again:
        return replace(use, again=use.again + more)
    return replace(use, kept=use.kept + more, read=0 if gone else use.read)
