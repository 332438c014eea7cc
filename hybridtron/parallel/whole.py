"""Gathers full tensors from all ranks' shards, one at a time, on the first process.

The tensors get names that are independent of the layout, so that any layout can load them and cut its own shards
(`cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.device import compute_device
from hybridtron.parallel.cut import gather
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mesh import Mesh
from hybridtron.parallel.plain_values import all_gather_values


def gathered(
    shares: Mapping[str, Callable[[], Tensor]], table: Mapping[str, Parameter], groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full tensor of the table with its name, on the first process. All processes must iterate together.

    `shares` maps the names that this rank's stages hold to functions that return its tensor shard, on the CPU. Every
    rank must return the same type for a name: `dtype`, or fp32 where the table asks for it.
    """
    assert groups.pipeline.group is not None
    names_of_stages: list[list[str]] = all_gather_values(list(shares), groups.pipeline.group)
    stage_ranks = dist.get_process_group_ranks(groups.pipeline.group)
    for name, parameter in table.items():
        owner = next(stage for stage, names in enumerate(names_of_stages) if name in names)
        whole = None
        if groups.pipeline.rank == owner:
            whole = _joined(shares[name](), parameter, groups.meshes[parameter.family])
        if owner > 0 and groups.stage.rank == 0:
            if whole is not None:
                dist.send(whole, stage_ranks[0])
            elif groups.pipeline.rank == 0:
                if parameter.fp32:
                    wide = torch.promote_types(dtype, torch.float32)
                else:
                    wide = dtype
                whole = torch.empty(parameter.shape, dtype=wide)
                dist.recv(whole, stage_ranks[owner])
        if groups.is_first:
            assert whole is not None
            yield name, whole


def _joined(share: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    """Return the full tensor, on the CPU of every rank in this stage."""
    if not parameter.active_cuts(mesh.sizes):
        return share.contiguous()
    return gather(share.to(compute_device()), parameter, mesh).cpu()  # the gather runs on the device
