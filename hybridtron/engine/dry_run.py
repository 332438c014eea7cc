"""Build every rank's model of a layout on the meta device, and compare the shards with the parameter table.

This needs no memory and no other process: torch's fake process group has the layout's size, and this process acts as
each rank in turn. Data-parallel replicas are identical, so only one is built.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybridtron.architecture.base import LetterOwner
from hybridtron.architecture.table import parameter_table
from hybridtron.config.layout import ProcessLaunch, shared_homes, stages_of
from hybridtron.config.schema import Config
from hybridtron.device import DTYPES, megatron_context
from hybridtron.engine.stage import build_stages
from hybridtron.parallel import groups


@dataclass(frozen=True)
class Built:
    """Weights that one rank built: their shapes by name."""

    rank: int
    pipeline_rank: int
    tensor_rank: int
    shapes: dict[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        """Number of values that the rank's weights have together."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def build_every_rank(config: Config) -> Iterator[Built]:
    """Build each rank of one data-parallel replica in turn, and yield its shapes."""
    world = config.parallel.model_ranks
    for rank in range(world):
        with megatron_context():
            place = groups.start(config.parallel, launch=ProcessLaunch(rank, world), fake=True)
            try:
                stages = build_stages(config, place, DTYPES[config.precision.name], torch.device("meta"))
            finally:
                groups.stop()
        shapes = {name: tuple(w.shape) for stage in stages for name, w in stage.model.named_parameters()}
        yield Built(rank, place.pipeline.rank, place.tensor.rank, shapes)


def faults(config: Config, ranks: list[Built]) -> list[str]:
    """List unknown weights, weights on no rank, and shards whose shapes do not make up the full weight.

    A tied embedding may be on two pipeline stages.
    """
    table = parameter_table(config.model)
    tensor = config.parallel.tensor
    homes = shared_homes(config.model, stages_of(config))
    lines = []
    for name, parameter in table.items():
        by_stage: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for rank in ranks:
            if name in rank.shapes:
                by_stage[rank.pipeline_rank].append(rank.shapes[name])
        twice = config.model.tie_embeddings and name == "embedding.weight" and config.parallel.pipeline > 1
        owner = parameter.owner
        if isinstance(owner, LetterOwner):
            expected = len(homes.get(owner.letter, [0]))
        else:
            expected = 1 + twice
        if len(by_stage) != expected:
            lines.append(f"{name} stands on {len(by_stage)} stages, not {expected}")
        share = parameter.share_shape(config.parallel.mesh_sizes)
        for stage, shapes in by_stage.items():
            if shapes != [share] * tensor:
                lines.append(f"{name} on stage {stage} has the shares {shapes}, not {tensor} of {share}")
    unknown = {name for rank in ranks for name in rank.shapes} - set(table)
    return lines + [f"{name} is in no table" for name in sorted(unknown)]
