"""Process groups: who shares a layer (tensor), who follows whom (pipeline), who reads other data (data).

Megatron-core keeps the groups in module globals; this file alone fills them, and hands on what others need as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridtron.config.layout import Launch, launched
from hybridtron.config.schema import ParallelConfig
from hybridtron.device import compute_device, megatron_context
from hybridtron.parallel.linear import TensorGroup


@dataclass(frozen=True)
class Groups:
    """This process's place in the layout."""

    tensor: TensorGroup
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run: it alone prints and writes what all share."""
        return self.rank == 0


def start(
    parallel: ParallelConfig, init_method: str = "env://", launch: Launch | None = None, fake: bool = False
) -> Groups:
    """Join the other processes and form the groups of the layout; `fake` plays one rank of many, alone."""
    launch = launch or launched()
    with megatron_context():
        if not dist.is_initialized():
            _join(launch, init_method, fake)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            create_gloo_process_groups=not fake,
        )
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()  # type: ignore[assignment]
    sequence = parallel.sequence and parallel.tensor > 1
    tensor = TensorGroup(parallel.tensor, group.rank(), sequence, group, parallel.transformer_engine)
    return Groups(
        tensor=tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel.pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        rank=launch.rank,
        world_size=launch.world_size,
    )


def _join(launch: Launch, init_method: str, fake: bool) -> None:
    backend = "gloo" if compute_device().type == "cpu" else "cpu:gloo,cuda:nccl"
    place = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timedelta(minutes=30)}
    if fake:
        dist.init_process_group("fake", store=FakeStore(), **place)
    elif launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), **place)
    else:
        dist.init_process_group(backend, init_method=init_method, **place)


def stop() -> None:
    """Leave the groups, so that others can be formed."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait until every process has come here."""
    dist.barrier()
