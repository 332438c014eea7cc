"""Weights of a pipeline rank: which it holds, and the bytes of them, their gradients and their optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridtron.architecture.base import LayerOwner, LetterOwner, ModelOwner, Parameter
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.layout import fp8_layers
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES, gradient_bytes, moment_bytes


class WeightBytes(NamedTuple):
    """Bytes of one device's weights and of all that stands beside them."""

    stored: int
    learning: int  # those of the weights that learn
    gradients: int
    optimizer: int


def held_names(
    table: Mapping[str, Parameter], letters: Sequence[str], stages: Sequence[range], pipeline: int
) -> list[list[str]]:
    """List the weights of every pipeline rank, as `parameter_table` names them; a tied embedding has two homes.

    Weights that the places of a letter share are held by every rank with a place; `letters` are the sub-layers'.
    """
    last = pipeline - 1
    tied = all(weight.owner != ModelOwner("head") for weight in table.values())
    rank_of = {layer: chunk % pipeline for chunk, stage in enumerate(stages) for layer in stage}
    held: list[list[str]] = [[] for _ in range(pipeline)]
    for name, weight in table.items():
        match weight.owner:
            case LayerOwner(layer):
                ranks = {rank_of[layer]}
            case LetterOwner(letter):
                ranks = {rank for layer, rank in rank_of.items() if letters[layer] == letter}
            case ModelOwner("embedding") if tied:
                ranks = {0, last}
            case ModelOwner("embedding"):
                ranks = {0}
            case _:
                ranks = {last}
        for rank in sorted(ranks):
            held[rank].append(name)
    return held


def local_size(parameter: Parameter, parallel: ParallelConfig) -> int:
    """Return the number of values that one rank holds of a weight."""
    return math.prod(parameter.share_shape(parallel.mesh_sizes))


def weight_bytes(phase: ResolvedPhase, copies: int, weights: Mapping[str, Parameter]) -> WeightBytes:
    """Return the bytes of one pipeline rank's weights, which `copies` ranks hold alike; frozen ones are only stored."""
    config = phase.config
    parallel = phase.config.parallel
    rule = OPTIMIZERS[phase.optim.name]()
    stored = learning = gradients = follows = others = 0
    for name, weight in weights.items():
        size = local_size(weight, parallel)
        width = VALUE_BYTES[config.precision.name]
        if weight.fp32:
            width = FP32_BYTES
        stored += width * size
        if not phase.learns(name):
            continue
        learning += width * size
        gradients += gradient_bytes(config.precision, weight.fp32) * size
        if width < FP32_BYTES:
            follows += FP32_BYTES * size
        for part in rule.parts(name, weight).values():
            part_bytes = moment_bytes(config.precision) * local_size(part, parallel)
            if part.shape == weight.shape:  # cut over data-parallel ranks as the weight is
                follows += part_bytes
            else:
                others += part_bytes
    ranks = copies if parallel.distributed_optimizer else 1
    return WeightBytes(stored, learning, gradients, -(-follows // ranks) + others)


def cached_bytes(config: Config, weights: Mapping[str, Parameter]) -> int:
    """Return the bytes of weights that FP8 products keep rounded; Transformer Engine keeps them transposed too."""
    if config.precision.name not in FP8_MULTIPLES or not config.precision.cache_weights:
        return 0
    layers = fp8_layers(config)
    in_fp8 = (
        weight
        for weight in weights.values()
        if weight.fp8 and isinstance(weight.owner, LayerOwner) and weight.owner.index in layers
    )
    copies = 1 if config.precision.emulate else 2
    return copies * sum(local_size(weight, config.parallel) for weight in in_fp8)
