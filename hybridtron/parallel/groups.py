"""Process groups of a layout: tensor, pipeline, data and context parallel.

Megatron-core keeps the groups in module globals. Only this file creates them; it passes the ranks and groups that
other files need as values.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridtron.config.layout import ProcessLaunch, launched
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.row_parts import RowPart
from hybridtron.device import compute_device, megatron_context
from hybridtron.parallel.context import WHOLE_ROWS, ContextGroup
from hybridtron.parallel.cut import Mesh, RankGroup
from hybridtron.parallel.linear import Products, TensorGroup
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.problems import ConfigError, Problem


@dataclass(frozen=True)
class Groups:
    """This process's place in the layout: its rank and group in each dimension."""

    tensor: TensorGroup
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    rank: int
    world_size: int
    context: ContextGroup = WHOLE_ROWS

    @property
    def copies(self) -> RankGroup:
        """Ranks that hold the same shard of the weights (data times context parallel), and this rank's index among
        them.
        """
        context = self.context
        return RankGroup(self.data_size * context.size, self.data_rank * context.size + context.rank)

    @property
    def part(self) -> RowPart:
        """Part of each row that this rank reads."""
        return RowPart(self.context.rank, self.context.size)

    @property
    def mesh(self) -> Mesh:
        """Dimensions over which weights and states are cut."""
        return {"tensor": self.tensor}

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone prints and writes the run's files."""
        return self.rank == 0


def start(
    parallel: ParallelConfig,
    init_method: str = "env://",
    launch: ProcessLaunch | None = None,
    fake: bool = False,
    timeout_s: float = 1800,
) -> Groups:
    """Join the other processes, form the process groups of the layout, and return this process's place.

    With `fake` a single process acts as one rank of many, without communication. `timeout_s` limits how long the
    others may take to join, and also how long any collective may take (rounded up to full minutes).
    """
    launch = launch or launched()
    with megatron_context():
        if not dist.is_initialized():
            _join(launch, init_method, fake, timedelta(seconds=timeout_s))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            create_gloo_process_groups=not fake,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()  # type: ignore[assignment]
    sequence = parallel.sequence and parallel.tensor > 1
    products = Products(parallel.transformer_engine)
    tensor = TensorGroup(parallel.tensor, group.rank(), group, sequence, products, parallel.regather)
    across: Any = parallel_state.get_context_parallel_group()
    return Groups(
        tensor=tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel.pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        rank=launch.rank,
        world_size=launch.world_size,
        context=ContextGroup(parallel.context, across.rank(), across),
    )


def _join(launch: ProcessLaunch, init_method: str, fake: bool, timeout: timedelta) -> None:
    """Initialise torch.distributed: gloo, and NCCL for a GPU's tensors; a fake backend if `fake`."""
    if compute_device().type == "cpu":
        backend = "gloo"
    else:
        backend = "cpu:gloo,cuda:nccl"
    place = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    if fake:
        dist.init_process_group("fake", store=FakeStore(), **place)
    elif launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), **place)
    else:
        if init_method == "env://":
            _check_meeting_place(os.environ)
        dist.init_process_group(backend, init_method=init_method, **place)


def _check_meeting_place(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the rendezvous address is not set; torchrun sets it, srun does not."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        cure = "export the first node's address and a free port, or submit with hybridtron submit, whose script does"
        raise ConfigError(
            [Problem(name, "missing", f"is not set, so that ranks can't connect: {cure}") for name in missing]
        )


def stop() -> None:
    """Destroy the groups, so that others can be formed."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Destroy the groups after an error, without waiting for other ranks, which may be waiting for this one.

    `stop` would first complete this rank's collectives under NCCL.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        distributed_c10d._abort_process_group()


def barrier() -> None:
    """Wait until every process has reached this call."""
    if dist.get_world_size() > 1:
        dist.barrier()


def all_reduce_max(values: list[float]) -> list[float]:
    """Return the maximum of each value over all processes.

    The reduction runs over gloo, so that no process waits for its device.
    """
    if dist.get_world_size() == 1:
        return values
    maxima = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def host_pids() -> list[tuple[str, int]]:
    """All-gather the host name and process id of every rank."""
    return [(host, process) for host, process in all_gather_values([socket.gethostname(), os.getpid()])]
