"""The mesh: ranks along named dimensions, over which the weights of a family are cut and copied.

Every family has a mesh of its own, because one mesh says for each of its dimensions that a weight is either cut over it
or copied along it. `parallel/groups.py` makes all meshes of a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hybridtron.architecture.base import DENSE, Cut, groups_of_heads


@dataclass(frozen=True)
class RankGroup:
    """Ranks along one dimension of the layout, and this rank's index among them."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def share(self, total: int) -> int:
        """Return how many of `total` channels or heads this rank holds; the number of ranks must divide it."""
        assert total % self.size == 0, f"{total} can't be shared by {self.size} ranks; config/check.py refuses it"
        return total // self.size

    def groups_used(self, heads: int, groups: int) -> slice | list[int]:
        """Return the indices of the replicated head groups that this rank's heads use (`groups_of_heads`)."""
        share = self.share(heads)
        return groups_of_heads(range(self.rank * share, (self.rank + 1) * share), heads, groups)


@dataclass(frozen=True)
class Mesh:
    """Ranks of one family of weights: `dimensions` cut them, by the names that a `Cut` uses.

    The ranks of `copies` hold equal shards. They compute on different tokens, and sum the gradients.
    """

    dimensions: Mapping[str, RankGroup] = field(default_factory=dict)
    copies: RankGroup = RankGroup()

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks in each dimension."""
        return {dimension: ranks.size for dimension, ranks in self.dimensions.items()}

    def uncut(self, cuts: Sequence[Cut]) -> list[RankGroup]:
        """Return the ranks of each dimension along which a tensor with these cuts is replicated."""
        cut_dimensions = {cut.over for cut in cuts}
        return [ranks for dimension, ranks in self.dimensions.items() if dimension not in cut_dimensions]

    def without_groups(self) -> Mesh:
        """Return the mesh without process groups, as another process can read it."""
        dimensions = {name: RankGroup(ranks.size, ranks.rank) for name, ranks in self.dimensions.items()}
        return Mesh(dimensions, RankGroup(self.copies.size, self.copies.rank))


def single_rank() -> dict[str, Mesh]:
    """Return the meshes of one process, which holds all weights in full."""
    return {DENSE: Mesh()}
