"""Builds the model of every rank on the meta device, and compares the shards with the parameter table.

The parameter table lists the full shape of every weight, and how ranks divide it. The check needs no memory for weights
and no other process: this process acts as one rank after another, in torch's fake process group. Data-parallel replicas
are equal, so only the ranks of one replica are built.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybridtron.architecture.base import LetterOwner
from hybridtron.config.pipeline_layout import ProcessLaunch, shared_homes, stages_of
from hybridtron.config.resolve import RunPlan
from hybridtron.device import DTYPES, megatron_context
from hybridtron.engine.stage import build_stages
from hybridtron.parallel import groups


@dataclass(frozen=True)
class RankShapes:
    """Shapes of the weights that one rank has built: weight's name -> shape."""

    rank: int
    pipeline_rank: int
    tensor_rank: int
    shapes: dict[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        """Number of elements in the rank's weights."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def build_every_rank(plan: RunPlan) -> Iterator[RankShapes]:
    """Build each rank's part of the model, on as few ranks as the layout allows, and yield its weights' shapes."""
    config = plan.config
    dtype = DTYPES[config.precision.name]
    world = config.parallel.fewest_ranks
    for rank in range(world):
        with megatron_context():
            rank_groups = groups.start(config.parallel, launch=ProcessLaunch(rank, world), fake=True)
            try:
                stages = build_stages(plan.arch, config, rank_groups, dtype=dtype, device=torch.device("meta"))
            finally:
                groups.stop()
        shapes = {name: tuple(w.shape) for stage in stages for name, w in stage.model.named_parameters()}
        yield RankShapes(rank, rank_groups.pipeline.rank, rank_groups.tensor.rank, shapes)


def faults(plan: RunPlan, ranks: list[RankShapes]) -> list[str]:
    """Return a message for each difference between the built shards and the parameter table.

    Differences are weights that the table does not list, weights on too many or too few pipeline ranks, and shards with
    a wrong shape. An embedding that is tied to the head is expected on two pipeline ranks.
    """
    config = plan.config
    table = plan.arch.table
    count = len(ranks) // config.parallel.pipeline  # ranks in a stage
    homes = shared_homes(plan.arch, stages_of(plan.arch, config))
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
            lines.append(f"{name} is on {len(by_stage)} pipeline ranks, not on {expected}")
        shape = parameter.shard_shape(config.parallel.mesh_sizes)
        for stage, shapes in by_stage.items():
            if shapes != [shape] * count:
                lines.append(f"{name} on pipeline rank {stage} has shards of {shapes}, not {count} shards of {shape}")
    unknown = {name for rank in ranks for name in rank.shapes} - set(table)
    return lines + [f"{name} is not in the parameter table" for name in sorted(unknown)]
