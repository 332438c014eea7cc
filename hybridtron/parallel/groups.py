"""Process groups of a layout: tensor, pipeline, data and context parallel.

Megatron-core keeps the groups in module globals. Only this file forms and reads them; other files get them as values.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridtron.architecture.base import DENSE
from hybridtron.config.layout import ProcessLaunch, launched
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.row_parts import RowPart
from hybridtron.device import compute_device, megatron_context
from hybridtron.parallel.context import ContextGroup
from hybridtron.parallel.linear import Products, TensorGroup
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.problems import ConfigError, Problem


@dataclass(frozen=True)
class Groups:
    """This process's place in the layout: the ranks along each dimension, and its index among them.

    `stage` are all ranks of this pipeline stage. `meshes` has the ranks that cut and copy the weights of each family.
    """

    tensor: TensorGroup
    pipeline: RankGroup
    data: RankGroup
    context: ContextGroup
    stage: RankGroup
    meshes: Mapping[str, Mesh]
    rank: int
    world_size: int

    @property
    def part(self) -> RowPart:
        """Part of each row that this rank reads."""
        return RowPart(self.context.rank, self.context.size)

    @property
    def dense(self) -> Mesh:
        """Mesh of the dense weights, whose copies are the data-parallel ranks, each with its context-parallel ones."""
        return self.meshes[DENSE]

    @property
    def states(self) -> Mesh:
        """Mesh of the carried states. They have no copies: data-parallel ranks have different lanes."""
        return Mesh({**self.dense.dimensions, "context": self.context})

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
    return _place(parallel, launch)


def _place(parallel: ParallelConfig, launch: ProcessLaunch) -> Groups:
    """Return this process's place in the groups that Megatron has formed."""
    tensor_ranks = _ranks(parallel_state.get_tensor_model_parallel_group())
    context_ranks = _ranks(parallel_state.get_context_parallel_group())
    tensor = TensorGroup(
        tensor_ranks.size,
        tensor_ranks.rank,
        tensor_ranks.group,
        sequence=parallel.sequence and parallel.tensor > 1,
        products=Products(parallel.transformer_engine),
        regather=parallel.regather,
    )
    copies = _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    return Groups(
        tensor=tensor,
        pipeline=_ranks(parallel_state.get_pipeline_model_parallel_group()),
        data=_ranks(parallel_state.get_data_parallel_group()),
        context=ContextGroup(context_ranks.size, context_ranks.rank, context_ranks.group),
        stage=_ranks(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        meshes={DENSE: Mesh({"tensor": tensor}, copies)},
        rank=launch.rank,
        world_size=launch.world_size,
    )


def _ranks(group: Any) -> RankGroup:
    """Return the ranks of a process group, and this rank's index among them."""
    return RankGroup(group.size(), group.rank(), group)


@contextmanager
def without_gloo_groups() -> Iterator[None]:
    """Have Megatron use its data-parallel group in place of those over gloo, which a fake start does not form."""
    core: Any = parallel_state
    names = ("get_data_parallel_group_gloo", "get_expert_data_parallel_group_gloo")
    formed = [getattr(core, name) for name in names]
    for name in names:
        setattr(core, name, lambda *_, **__: parallel_state.get_data_parallel_group())
    try:
        yield
    finally:
        for name, getter in zip(names, formed, strict=True):
            setattr(core, name, getter)


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
