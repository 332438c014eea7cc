"""Shards weights and states over the mesh, and gathers full tensors.

The mesh arranges the ranks along named dimensions (`mesh.py`). A cut divides one axis of a tensor over the ranks along
one mesh dimension. Along this axis a rank holds one or more runs, which are index ranges. The rank's shard is the
concatenation of its runs. In a weight that is fused from several matrices, each matrix is divided separately, so that a
rank has a run for each matrix. A tensor with several cuts is divided along one axis after the other, and gathered in
the opposite order.

The names and shapes of full tensors do not depend on the parallel layout, so any layout can cut its shards from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import Cut, Parameter, Sharded
from hybridtron.device import compute_device
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.plain_values import all_gather_values


def cut(whole: Tensor, sharded: Sharded, mesh: Mesh, leading: int = 0) -> Tensor:
    """Return this rank's shard of a full tensor. A cut's axis n is the tensor's axis `leading` + n."""
    for axis_cut in sharded.active_cuts(mesh.sizes):
        runs = held_runs(sharded, axis_cut, mesh.dimensions[axis_cut.over])
        whole = torch.cat(
            [whole.narrow(leading + axis_cut.axis, run.start, len(run)) for run in runs], leading + axis_cut.axis
        )
    return whole


def gather(shard: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    """Return the full weight on every rank, from all ranks' shards. All ranks must call this function together."""
    for axis_cut in reversed(parameter.active_cuts(mesh.sizes)):
        ranks = mesh.dimensions[axis_cut.over]
        own_shard = shard.contiguous()
        shards = [torch.empty_like(own_shard) for _ in range(ranks.size)]
        dist.all_gather(shards, own_shard, group=ranks.group)
        shard = join(shards, parameter, axis_cut)
    return shard


def join(shards: Sequence[Tensor], parameter: Parameter, over: Cut) -> Tensor:
    """Join all ranks' shards along the mesh dimension of the cut `over`; `shards` has the shards by rank."""
    shape = list(shards[0].shape)
    shape[over.axis] = parameter.shape[over.axis]
    joined = shards[0].new_empty(shape)
    for rank, shard in enumerate(shards):
        at = 0
        for run in held_runs(parameter, over, RankGroup(len(shards), rank)):
            joined.narrow(over.axis, run.start, len(run)).copy_(shard.narrow(over.axis, at, len(run)))
            at += len(run)
    return joined


def held_runs(sharded: Sharded, over: Cut, ranks: RankGroup) -> list[range]:
    """Return the runs that a rank holds along the axis of the cut `over`, in the order within the shard."""
    sizes = sharded.fused_sizes(over.axis)
    if over.readers is not None:  # the axis has key-value heads: a rank holds the heads that its query heads read
        used = ranks.groups_used(over.readers, *sizes)
        if isinstance(used, slice):
            return [range(used.start, used.stop)]
        return [range(h, h + 1) for h in used]
    runs = []
    start = 0
    for size in sizes:
        length = size // ranks.size
        runs.append(range(start + ranks.rank * length, start + (ranks.rank + 1) * length))
        start += size
    return runs


def gather_full_tensors(
    shards: Mapping[str, Callable[[], Tensor]], table: Mapping[str, Parameter], groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full tensor in the table with its name, on the first process. All processes must iterate together.

    `shards` maps the name of each tensor in this rank's pipeline stages to a function that returns the rank's shard on
    the CPU. The shard's dtype must be fp32 if the table asks for fp32, otherwise `dtype`.
    """
    assert groups.pipeline.group is not None
    names_of_stages: list[list[str]] = all_gather_values(list(shards), groups.pipeline.group)
    stage_ranks = dist.get_process_group_ranks(groups.pipeline.group)
    for name, parameter in table.items():
        owner = next(stage for stage, names in enumerate(names_of_stages) if name in names)
        whole = None
        if groups.pipeline.rank == owner:
            whole = _joined(shards[name](), parameter, groups.meshes[parameter.family])
        if owner > 0 and groups.stage.rank == 0:
            if whole is not None:
                dist.send(whole.to(compute_device()), stage_ranks[0])
            elif groups.pipeline.rank == 0:
                if parameter.fp32:
                    wide = torch.promote_types(dtype, torch.float32)
                else:
                    wide = dtype
                received = torch.empty(parameter.shape, dtype=wide, device=compute_device())
                dist.recv(received, stage_ranks[owner])
                whole = received.cpu()
        if groups.is_first:
            assert whole is not None
            yield name, whole


def _joined(shard: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    """Return the full tensor, on the CPU, on every rank in this pipeline stage."""
    if not parameter.active_cuts(mesh.sizes):
        return shard.contiguous()
    return gather(shard.to(compute_device()), parameter, mesh).cpu()  # the gather runs on the device
