"""Memory for the weights on a pipeline rank, for their gradients, and for their optimizer states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridtron.architecture.base import DENSE, EXPERTS, LayerOwner, LetterOwner, ModelOwner, Parameter
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.pipeline_layout import fp8_layers
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import ParallelConfig
from hybridtron.config.update_rule import update_rule
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES, gradient_bytes, moment_bytes


class WeightBytes(NamedTuple):
    """Bytes on one device.

    stored: all weights
    learning: the weights that are trained
    gradients, optimizer: gradients and optimizer states for the trained weights
    sent_gradients: gradients that the device sends when ranks with the same shards reduce-scatter them
    sent_weights: trained weights that the device sends when these ranks all-gather them
    """

    stored: int
    learning: int
    gradients: int
    optimizer: int
    sent_gradients: int
    sent_weights: int


def weights_by_rank(
    table: Mapping[str, Parameter], letters: Sequence[str], stages: Sequence[range], pipeline: int
) -> list[list[str]]:
    """Return, for every pipeline rank, its weights' names in the parameter table.

    letters: each sub-layer's letter in the layer pattern
    stages: each stage's sub-layers; stage n is on rank n modulo `pipeline`
    pipeline: how many pipeline ranks there are

    An embedding that is tied to the head is on the first and the last rank. Weights that all sub-layers with a letter
    share are on every rank that has such a sub-layer.
    """
    last = pipeline - 1
    tied = all(weight.owner != ModelOwner("head") for weight in table.values())
    rank_of = {layer: chunk % pipeline for chunk, stage in enumerate(stages) for layer in stage}
    names_by_rank: list[list[str]] = [[] for _ in range(pipeline)]
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
            names_by_rank[rank].append(name)
    return names_by_rank


def local_size(parameter: Parameter, parallel: ParallelConfig) -> int:
    """Return how many elements one rank's shard of a weight has."""
    return math.prod(parameter.shard_shape(parallel.mesh_sizes))


def copies_of(parallel: ParallelConfig, data: int) -> dict[str, int]:
    """Return weight family -> number of ranks that hold the same shards; `data` counts data-parallel ranks."""
    stage = parallel.tensor * parallel.context * data
    return {DENSE: stage // parallel.tensor, EXPERTS: stage // (parallel.expert * parallel.expert_tensor_ranks)}


def weight_bytes(phase: ResolvedPhase, copies: Mapping[str, int], weights: Mapping[str, Parameter]) -> WeightBytes:
    """Return the bytes of a pipeline rank's weights, their gradients and their optimizer states on one device.

    copies: `copies_of` the layout
    weights: the rank's weights by name. Frozen weights have neither gradients nor optimizer states.
    """
    total = [0] * len(WeightBytes._fields)
    for family, ranks in copies.items():
        of_family = {name: weight for name, weight in weights.items() if weight.family == family}
        total = [before + more for before, more in zip(total, _family_bytes(phase, ranks, of_family), strict=True)]
    return WeightBytes(*total)


def _family_bytes(phase: ResolvedPhase, copies: int, weights: Mapping[str, Parameter]) -> WeightBytes:
    """Return the bytes of the weights of one family.

    copies: number of ranks that hold the same weight shards; a distributed optimizer divides its states among them

    With `run.ema`, the optimizer states include the moving average.
    """
    config = phase.config
    parallel = phase.config.parallel
    rule = update_rule(phase.optim)
    stored = learning = gradients = divided = undivided = 0
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
            divided += FP32_BYTES * size
        if config.run.ema is not None:
            divided += FP32_BYTES * size
        for part in rule.parts(name, weight).values():
            part_bytes = moment_bytes(config.precision) * local_size(part, parallel)
            if part.shape == weight.shape:  # only such states are divided among the copies
                divided += part_bytes
            else:
                undivided += part_bytes
    ranks = copies if parallel.distributed_optimizer else 1
    return WeightBytes(
        stored,
        learning,
        gradients,
        -(-divided // ranks) + undivided,
        gradients * (copies - 1) // copies,
        learning * (copies - 1) // copies,
    )


def cached_bytes(phase: ResolvedPhase, weights: Mapping[str, Parameter]) -> int:
    """Return the bytes of weights in FP8 that are kept during a step; 0 without `precision.cache_weights`.

    Transformer Engine keeps two copies of each weight, one of them transposed. FP8 emulation keeps one copy.
    """
    config = phase.config
    if config.precision.name not in FP8_MULTIPLES or not config.precision.cache_weights:
        return 0
    layers = fp8_layers(phase.arch, config.precision)
    in_fp8 = (
        weight
        for weight in weights.values()
        if weight.fp8 and isinstance(weight.owner, LayerOwner) and weight.owner.index in layers
    )
    copies = 1 if config.precision.emulate else 2
    return copies * sum(local_size(weight, config.parallel) for weight in in_fp8)
