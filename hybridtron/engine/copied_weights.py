"""Weights with copies on several data-parallel ranks: one rank reads a weight from a checkpoint and broadcasts it.

This is so at a restart, and for initial weights from another run (`run.weights`).

So the bytes that are read from the file system do not depend on the number of replicas. The weights are spread over the
replicas, so that all of them read at the same time. Moments and fp32 masters need no copies: with the distributed
optimizer, each rank holds elements of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from hybridtron.parallel.mesh import RankGroup


@dataclass(frozen=True)
class CopiedWeight:
    """This rank's shard of a weight, and the ranks that hold the same shard.

    keys: names under which checkpoints store the weight
    reader: index in `ranks` of the rank that reads the weight
    """

    keys: Sequence[str]
    shard: Tensor
    ranks: RankGroup
    reader: int

    @property
    def is_reader(self) -> bool:
        return self.reader == self.ranks.rank


def copied_weight(name: str, keys: Iterable[str], shard: Tensor, ranks: RankGroup) -> CopiedWeight:
    """Return the `CopiedWeight` for a shard. A hash of the weight's name picks the reader."""
    return CopiedWeight(list(keys), shard, ranks, zlib.crc32(name.encode()) % ranks.size)


def send_copies(weights: Sequence[CopiedWeight]) -> None:
    """Broadcast each weight from its reader, in place. All ranks call this together."""
    for weight in weights:
        if weight.ranks.size > 1:
            assert weight.ranks.group is not None
            source = dist.get_global_rank(weight.ranks.group, weight.reader)
            dist.broadcast(weight.shard, source, group=weight.ranks.group)
