"""Whole tensors from all ranks' shares, one at a time, on the process that writes them.

A checkpoint holds whole tensors under names that no layout enters, so that any layout can load it: each rank then
takes its own share (`cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.device import compute_device
from hybridtron.parallel.cut import gather, mesh_sizes
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.plain_values import all_gather_values


def gathered(
    shares: Mapping[str, Callable[[], Tensor]], table: Mapping[str, Parameter], groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the table, whole, with its name, on the first process; all processes walk through this together.

    `shares` has the names that this rank's stages hold, and makes this tensor rank's share of each, on the CPU. Those
    of a name are all of one type: `dtype`, or fp32 where the table wants it.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    names_of_stages: list[list[str]] = all_gather_values(list(shares), pipeline)
    stage_ranks = dist.get_process_group_ranks(pipeline)
    for name, parameter in table.items():
        owner = next(stage for stage, names in enumerate(names_of_stages) if name in names)
        whole = _joined(shares[name](), parameter, groups) if groups.pipeline_rank == owner else None
        if owner > 0 and groups.tensor.rank == 0 and groups.copies.rank == 0:
            if whole is not None:
                dist.send(whole, stage_ranks[0])
            elif groups.pipeline_rank == 0:
                wide = torch.promote_types(dtype, torch.float32) if parameter.fp32 else dtype
                whole = torch.empty(parameter.shape, dtype=wide)
                dist.recv(whole, stage_ranks[owner])
        if groups.is_first:
            assert whole is not None
            yield name, whole


def _joined(share: Tensor, parameter: Parameter, groups: Groups) -> Tensor:
    """The whole tensor, on the CPU of every rank of this stage."""
    if not parameter.active_cuts(mesh_sizes(groups.mesh)):
        return share.contiguous()
    return gather(share.to(compute_device()), parameter, groups.mesh).cpu()  # ranks talk from device to device
