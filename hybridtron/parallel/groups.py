"""Process groups of a layout: tensor, pipeline, data, context and expert parallel.

Megatron-core keeps process groups in global variables. Only this file creates and reads these variables; other files
get a `Groups` object.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridtron.architecture.base import DENSE, EXPERTS
from hybridtron.config.pipeline_layout import ProcessLaunch, launched
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.sequence_shard import ShardIndex
from hybridtron.device import compute_device, megatron_context
from hybridtron.parallel.control import Control, alone, form
from hybridtron.parallel.experts import ExpertRanks
from hybridtron.parallel.linear import LinearBackend, TensorGroup
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.rendezvous import store_of_start
from hybridtron.problems import ConfigError, Problem

LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class Groups:
    """This process's groups, and its rank in each group.

    tensor, pipeline, data, context: the ranks along each dimension of the parallel layout
    stage: all ranks in this pipeline stage
    meshes: weight family -> the ranks that shard and replicate its weights (`mesh.py`)
    control: group for messages between all ranks from host memory (`control.py`)
    rank, world_size: this process's global rank, and the number of processes
    """

    tensor: TensorGroup
    pipeline: RankGroup
    data: RankGroup
    context: RankGroup
    stage: RankGroup
    meshes: Mapping[str, Mesh]
    control: Control
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
            create_gloo_process_groups=False,  # only Megatron's own checkpoints need these
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )
        if fake or launch.world_size == 1:
            control = alone(launch.rank)
        else:
            control = form(launch.rank, launch.world_size, timedelta(seconds=timeout_s))
    return _place(parallel, launch, control)


def _place(parallel: ParallelConfig, launch: ProcessLaunch, control: Control) -> Groups:
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
        control=control,
        rank=launch.rank,
        world_size=launch.world_size,
    )


def _ranks(group: Any) -> RankGroup:
    """Return a process group as a RankGroup, with its size and this rank's index."""
    return RankGroup(group.size(), group.rank(), group)


def _join(launch: ProcessLaunch, init_method: str, fake: bool, timeout: timedelta) -> None:
    """Initialize torch.distributed with NCCL for GPUs, with gloo for CPUs, or with a fake backend.

    Megatron forms about ten groups over all ranks, and a group has the default group's backend. On GPUs gloo serves
    only the control group (`control.py`). On CPUs it serves all groups. By default gloo connects every pair of ranks in
    each group: 10 (N - 1) connections per rank for N ranks. With TORCH_GLOO_LAZY_INIT it connects two ranks only when
    they first communicate in a group, so the number of connections does not depend on N.
    """
    os.environ.setdefault(LAZY_CONNECTIONS, "1")
    if compute_device().type == "cpu":
        backend = "gloo"
    else:
        backend = "nccl"
    options = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    if fake:
        dist.init_process_group("fake", store=FakeStore(), **options)
    elif launch.world_size == 1:  # no other process to find, so no address or port is needed
        dist.init_process_group(backend, store=dist.HashStore(), **options)
    elif init_method == "env://":
        _check_meeting_place(os.environ)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher holds the store
            dist.init_process_group(backend, init_method=init_method, **options)
        else:
            dist.init_process_group(backend, store=store_of_start(os.environ, launch, timeout), **options)
    else:
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


def node_pids(control: Control) -> list[tuple[int, int]]:
    """All-gather the index of every rank's node, and the rank's process id."""
    return list(zip(control.node_of_rank, control.all_gather(os.getpid()), strict=True))
