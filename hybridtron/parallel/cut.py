"""Sharding of weights and states over the mesh, and gathering them again.

Along an axis a rank holds some runs of entries; concatenated they are its shard. Each part of a fused weight is cut
separately. A tensor with several cuts is cut along one axis after the other, and gathered in the opposite order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import Cut, Parameter, Sharded
from hybridtron.parallel.mesh import Mesh, RankGroup


def cut(whole: Tensor, sharded: Sharded, mesh: Mesh, leading: int = 0) -> Tensor:
    """Return this rank's shard of a full tensor. The cuts count axes from `leading` on."""
    for axis_cut in sharded.active_cuts(mesh.sizes):
        runs = held_runs(sharded, axis_cut, mesh.dimensions[axis_cut.over])
        whole = torch.cat(
            [whole.narrow(leading + axis_cut.axis, run.start, len(run)) for run in runs], leading + axis_cut.axis
        )
    return whole


def gather(share: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    """Return the full weight on every rank, from all ranks' shards. All ranks must call this together."""
    for axis_cut in reversed(parameter.active_cuts(mesh.sizes)):
        ranks = mesh.dimensions[axis_cut.over]
        own_shard = share.contiguous()
        shares = [torch.empty_like(own_shard) for _ in range(ranks.size)]
        dist.all_gather(shares, own_shard, group=ranks.group)
        share = join(shares, parameter, axis_cut)
    return share


def join(shares: Sequence[Tensor], parameter: Parameter, over: Cut) -> Tensor:
    """Assemble the shards along one mesh dimension, given in the order of ranks."""
    shape = list(shares[0].shape)
    shape[over.axis] = parameter.shape[over.axis]
    joined = shares[0].new_empty(shape)
    for rank, share in enumerate(shares):
        at = 0
        for run in held_runs(parameter, over, RankGroup(len(shares), rank)):
            joined.narrow(over.axis, run.start, len(run)).copy_(share.narrow(over.axis, at, len(run)))
            at += len(run)
    return joined


def held_runs(sharded: Sharded, over: Cut, ranks: RankGroup) -> list[range]:
    """Return the runs along a cut's axis that a rank holds, in its shard's order."""
    sizes = sharded.fused_sizes(over.axis)
    if over.readers is not None:
        used = ranks.groups_used(over.readers, *sizes)
        if isinstance(used, slice):
            return [range(used.start, used.stop)]
        return [range(h, h + 1) for h in used]
    runs = []
    start = 0
    for size in sizes:
        share = size // ranks.size
        runs.append(range(start + ranks.rank * share, start + (ranks.rank + 1) * share))
        start += size
    return runs
