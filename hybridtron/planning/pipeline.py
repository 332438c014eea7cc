"""Which weights a pipeline rank holds, its passes in Megatron's order with what is in flight, and what it sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridtron.architecture.base import Parameter
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.layout import fp8_layers
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES, gradient_bytes, moment_bytes


def held_names(table: Iterable[str], letters: Sequence[str], stages: Sequence[range], pipeline: int) -> list[list[str]]:
    """The weights of every pipeline rank, as `parameter_table` names them; a tied embedding has two homes.

    What places of a letter share, every rank with a place holds: `letters` are those of the sub-layers.
    """
    names = list(table)
    last = pipeline - 1
    rank_of = {layer: chunk % pipeline for chunk, stage in enumerate(stages) for layer in stage}
    held: list[list[str]] = [[] for _ in range(pipeline)]
    for name in names:
        if name == "embedding.weight":
            held[0].append(name)
            if last and "head.weight" not in names:
                held[last].append(name)
        elif name.startswith("shared."):
            for rank in sorted({rank for layer, rank in rank_of.items() if letters[layer] == name.split(".")[1]}):
                held[rank].append(name)
        else:
            held[rank_of[int(name.split(".")[1])] if name.startswith("layers.") else last].append(name)
    return held


def local_size(parameter: Parameter, parallel: ParallelConfig) -> int:
    """Values that one rank holds of a weight."""
    return math.prod(parameter.share_shape(parallel.mesh_sizes))


def cached_bytes(config: Config, weights: Mapping[str, Parameter]) -> int:
    """Of the weights that FP8 products keep rounded: as they are, and by Transformer Engine transposed too."""
    if config.precision.name not in FP8_MULTIPLES or not config.precision.cache_weights:
        return 0
    layers = fp8_layers(config)
    in_fp8 = (
        weight
        for name, weight in weights.items()
        if weight.fp8 and name.startswith("layers.") and int(name.split(".")[1]) in layers
    )
    copies = 1 if config.precision.emulate else 2
    return copies * sum(local_size(weight, config.parallel) for weight in in_fp8)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in an optimizer step."""

    tensor: int
    pipeline: int
    gradients: int
    parameters: int
    host: int = 0  # to its host and from it
    context: int = 0  # between the ranks that share the rows

    @property
    def total(self) -> int:
        """All of it together."""
        return self.tensor + self.pipeline + self.gradients + self.parameters + self.host + self.context


def summed_over_stages(phase: ResolvedPhase, table: Mapping[str, Parameter], held: Sequence[Sequence[str]]) -> int:
    """Bytes that a rank sends of the gradients of weights that places on several stages share."""
    ranks = len(held)
    config = phase.config
    homes = Counter(name for names in held for name in names if table[name].shared and phase.learns(name))
    several = {name: table[name] for name, count in homes.items() if count > 1}
    summed = sum(
        gradient_bytes(config.precision, weight.fp32) * local_size(weight, config.parallel)
        for weight in several.values()
    )
    return 2 * summed * (ranks - 1) // ranks


class Turn(NamedTuple):
    """A forward pass of a virtual stage, then a backward pass of one, or only one of the two."""

    live: tuple[int, ...]  # micro-batches that each virtual stage holds in between
    forward: int | None
    backward: int | None


def turns(parallel: ParallelConfig, rank: int, micro_batches: int) -> Iterator[Turn]:
    """The passes of a rank in Megatron's schedule."""
    pipeline = parallel.pipeline
    stages = parallel.virtual_pipeline
    # the schedule repeats itself after a round of all stages: a few rounds show the peak
    micro_batches = min(micro_batches, 4 * pipeline)
    total = micro_batches * stages
    # 1F1B: a rank runs forward until the first micro batch has come back from the last rank, pipeline - rank - 1
    # passes, and then one forward for each backward. Interleaved, micro batches pass each virtual stage in groups of
    # `pipeline`: the first comes back after all stages but the last have run forward for a group, and the way to the
    # last rank and back takes two passes for each rank in between.
    warm_up = pipeline - rank - 1
    if stages > 1:
        warm_up = 2 * warm_up + (stages - 1) * pipeline
    warm_up = min(warm_up, total - 1)
    live = [0] * stages
    for step in range(total + warm_up):
        forward = step // pipeline % stages if step < total else None
        if step >= warm_up:
            backward = stages - 1 - (step - warm_up) // pipeline % stages
        else:
            backward = None
        if forward is not None:
            live[forward] += 1
        yield Turn(tuple(live), forward, backward)
        if backward is not None:
            live[backward] -= 1


class WeightBytes(NamedTuple):
    """What one device holds of its weights, in bytes."""

    stored: int
    learning: int  # those of them that learn
    gradients: int
    optimizer: int


def weight_bytes(phase: ResolvedPhase, data: int, weights: Mapping[str, Parameter]) -> WeightBytes:
    """Of the weights of one pipeline rank, with this number of data-parallel ranks; what is frozen is stored alone."""
    config = phase.config
    parallel = phase.config.parallel
    rule = OPTIMIZERS[phase.optim.name]()
    stored = learning = gradients = follows = others = 0
    for name, weight in weights.items():
        size = local_size(weight, parallel)
        if weight.fp32:
            width = FP32_BYTES
        else:
            width = VALUE_BYTES[config.precision.name]
        stored += width * size
        if not phase.learns(name):
            continue
        learning += width * size
        gradients += gradient_bytes(config.precision, weight.fp32) * size
        follows += 0 if width == FP32_BYTES else FP32_BYTES * size
        for part in rule.parts(name, weight).values():  # those of the weight's shape are cut over data ranks as it is
            held = moment_bytes(config.precision) * local_size(part, parallel)
            if part.shape == weight.shape:
                follows = follows + held
                others = others
            else:
                follows = follows
                others = others + held
    ranks = data if parallel.distributed_optimizer else 1
    return WeightBytes(stored, learning, gradients, -(-follows // ranks) + others)
