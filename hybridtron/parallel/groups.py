"""Process groups of a layout: tensor, pipeline, data, context and expert parallel.

Megatron-core keeps process groups in global variables. Only this file creates and reads these variables; other files
get a `Groups` object.
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

from hybridtron.architecture.base import DENSE, EXPERTS
from hybridtron.config.pipeline_layout import ProcessLaunch, launched
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.sequence_shard import ShardIndex
from hybridtron.device import compute_device, megatron_context
from hybridtron.parallel.experts import ExpertRanks
from hybridtron.parallel.linear import LinearBackend, TensorGroup
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.problems import ConfigError, Problem

LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class Groups:
    """This process's groups, and its rank in each group.

    tensor, pipeline, data, context: the ranks along each dimension of the parallel layout
    stage: all ranks in this pipeline stage
    meshes: weight family -> the ranks that shard and replicate its weights (`mesh.py`)
    rank, world_size: this process's global rank, and the number of processes
    """

    tensor: TensorGroup
    pipeline: RankGroup
    data: RankGroup
    context: RankGroup
    stage: RankGroup
    meshes: Mapping[str, Mesh]
    rank: int
    world_size: int

    @property
    def shard_index(self) -> ShardIndex:
        """Index of the sequence shard that this rank reads, with the number of shards in each row (sequence)."""
        return ShardIndex(self.context.rank, self.context.size)

    @property
    def dense(self) -> Mesh:
        """Mesh for the dense weights, which are replicated over all ranks along the data and context dimensions."""
        return self.meshes[DENSE]

    @property
    def states(self) -> Mesh:
        """Mesh for recurrent states that are carried from step to step.

        States can be sharded over the context dimension. There are no copies to reduce: data-parallel ranks carry
        states for different rows (sequences).
        """
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
    """Join the other processes, form the layout's process groups, and return them.

    `launch` has this process's rank and the number of processes. By default both come from the environment. With `fake`
    a single process acts as one among many ranks, without communication. `timeout_s` limits how long the other
    processes may take to join. It also limits how long a collective may take, rounded up to full minutes.
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
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor_ranks,
            create_gloo_process_groups=not fake,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )
    return _place(parallel, launch)


def _place(parallel: ParallelConfig, launch: ProcessLaunch) -> Groups:
    """Return the groups that Megatron has formed, with this process's rank in each group."""
    tensor_ranks = _ranks(parallel_state.get_tensor_model_parallel_group())
    expert = _ranks(parallel_state.get_expert_model_parallel_group())
    expert_tensor = _ranks(parallel_state.get_expert_tensor_parallel_group())
    tensor = TensorGroup(
        tensor_ranks.size,
        tensor_ranks.rank,
        tensor_ranks.group,
        sequence=parallel.sequence and parallel.tensor > 1,
        backend=LinearBackend(parallel.transformer_engine),
        regather=parallel.regather,
        experts=ExpertRanks(expert, expert_tensor),
    )
    copies = _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    expert_copies = _ranks(parallel_state.get_expert_data_parallel_group())
    # `Mesh.at` counts a stage's ranks along the dimensions in this order
    meshes = {
        DENSE: Mesh({"tensor": tensor}, copies),
        EXPERTS: Mesh({"expert_tensor": expert_tensor, "expert": expert}, expert_copies),
    }
    return Groups(
        tensor=tensor,
        pipeline=_ranks(parallel_state.get_pipeline_model_parallel_group()),
        data=_ranks(parallel_state.get_data_parallel_group()),
        context=_ranks(parallel_state.get_context_parallel_group()),
        stage=_ranks(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        meshes=meshes,
        rank=launch.rank,
        world_size=launch.world_size,
    )


def _ranks(group: Any) -> RankGroup:
    """Return a process group as a RankGroup, with its size and this rank's index."""
    return RankGroup(group.size(), group.rank(), group)


@contextmanager
def without_gloo_groups() -> Iterator[None]:
    """Let the block run without gloo groups, which `start(fake=True)` does not form.

    Megatron's functions for the gloo groups return the groups for the device's tensors instead.
    """
    core: Any = parallel_state
    stand_ins = {
        "get_data_parallel_group_gloo": lambda *_, **__: parallel_state.get_data_parallel_group(),
        "get_expert_data_parallel_group_gloo": lambda *_, **__: parallel_state.get_expert_data_parallel_group(),
    }
    formed = {name: getattr(core, name) for name in stand_ins}
    for name, getter in stand_ins.items():
        setattr(core, name, getter)
    try:
        yield
    finally:
        for name, getter in formed.items():
            setattr(core, name, getter)


def _join(launch: ProcessLaunch, init_method: str, fake: bool, timeout: timedelta) -> None:
    """Initialize torch.distributed with gloo for CPU tensors and NCCL for GPU tensors, or with a fake backend.

    Megatron forms about ten groups over all ranks. By default gloo connects every pair of ranks in each of these
    groups: 10 (N - 1) connections per rank for N ranks. With TORCH_GLOO_LAZY_INIT it connects two ranks only when they
    first communicate in a group, so the number of connections does not depend on N.
    """
    os.environ.setdefault(LAZY_CONNECTIONS, "1")
    if compute_device().type == "cpu":
        backend = "gloo"
    else:
        backend = "cpu:gloo,cuda:nccl"
    options = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    if fake:
        dist.init_process_group("fake", store=FakeStore(), **options)
    elif launch.world_size == 1:  # no other process to find, so no address or port is needed
        dist.init_process_group(backend, store=dist.HashStore(), **options)
    else:
        if init_method == "env://":
            _check_meeting_place(os.environ)
        dist.init_process_group(backend, init_method=init_method, **options)


def _check_meeting_place(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the rendezvous address is not set; torchrun sets the address, srun does not."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        cure = "export the first node's address and a free port, or use hybridtron submit, whose script exports both"
        raise ConfigError(
            [Problem(name, "missing", f"is not set, so that ranks can't connect: {cure}") for name in missing]
        )


def stop() -> None:
    """Destroy this process's groups, so that new groups can be formed."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Destroy the groups after an error, without waiting for other ranks.

    With NCCL, `stop` would first wait for this rank's collectives, which may never complete after an error.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        distributed_c10d._abort_process_group()


def barrier() -> None:
    """Wait until every process has reached this call."""
    if dist.get_world_size() > 1:
        dist.barrier()


def all_reduce_max(values: list[float]) -> list[float]:
    """Return each value's maximum over all processes.

    The reduction runs over gloo, so that no process waits for its device.
    """
    if dist.get_world_size() == 1:
        return values
    maxima = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def host_pids() -> list[tuple[str, int]]:
    """All-gather every rank's host name and process id."""
    return [(host, process) for host, process in all_gather_values([socket.gethostname(), os.getpid()])]
