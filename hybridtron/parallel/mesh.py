"""The mesh: ranks along named dimensions, over which a family of weights is sharded and replicated.

A family consists of weights that the same ranks shard and replicate: the dense weights, or the routed experts. Each
family has its own mesh. `parallel/groups.py` creates a layout's meshes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hybridtron.architecture.base import DENSE, EXPERTS, Cut, groups_of_heads


@dataclass(frozen=True)
class RankGroup:
    """Ranks along one dimension in the layout, and this rank's index among them."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def share(self, total: int) -> int:
        """Return how many of `total` channels or heads this rank holds; the rank count must divide `total`."""
        assert total % self.size == 0, f"{total} can't be shared by {self.size} ranks; config/check.py refuses this"
        return total // self.size

    def part(self, total: int) -> range:
        """Return the indices of the heads, channels or experts that this rank holds; the ranks hold equally many."""
        share = self.share(total)
        return range(self.rank * share, (self.rank + 1) * share)

    def groups_used(self, heads: int, groups: int) -> slice | list[int]:
        """Return the indices for the head groups that this rank's heads use.

        The heads in one group share something, such as keys and values. `heads` says how many heads the ranks divide
        among them, and `groups` is the number of head groups.
        """
        return groups_of_heads(self.part(heads), heads, groups)


ONE_RANK = RankGroup()
"""The rank along a dimension with only one rank."""


@dataclass(frozen=True)
class Mesh:
    """The ranks that shard and replicate one weight family.

    dimensions: name of a dimension over which weights can be sharded, as in `Cut.over` -> the ranks along it
    copies: ranks that hold equal shards, compute on different tokens, and reduce their gradients
    """

    dimensions: Mapping[str, RankGroup] = field(default_factory=dict)
    copies: RankGroup = RankGroup()

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each dimension."""
        return {dimension: ranks.size for dimension, ranks in self.dimensions.items()}

    def uncut(self, cuts: Sequence[Cut]) -> list[RankGroup]:
        """Return the ranks along each dimension over which a tensor with these cuts is replicated."""
        cut_dimensions = {cut.over for cut in cuts}
        return [ranks for dimension, ranks in self.dimensions.items() if dimension not in cut_dimensions]

    def at(self, index: int) -> Mesh:
        """Return the mesh of another rank in the pipeline stage, without process groups.

        index: the rank's index in the stage; the first dimension varies fastest, and the copies vary slowest
        """
        dimensions = {}
        for name, ranks in self.dimensions.items():
            index, rank = divmod(index, ranks.size)
            dimensions[name] = RankGroup(ranks.size, rank)
        return Mesh(dimensions, RankGroup(self.copies.size, index))

    def without_groups(self) -> Mesh:
        """Return the mesh without its process groups, which exist only in this process."""
        dimensions = {name: RankGroup(ranks.size, ranks.rank) for name, ranks in self.dimensions.items()}
        return Mesh(dimensions, RankGroup(self.copies.size, self.copies.rank))


def single_rank() -> dict[str, Mesh]:
    """Return the meshes for a single process, which holds all weights in full."""
    return {DENSE: Mesh(), EXPERTS: Mesh()}
