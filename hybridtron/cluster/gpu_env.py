"""Environment variables for training on GPUs. `hybridtron submit` sets them, and `hybridtron doctor` reports them.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
        Segments of the CUDA caching allocator can grow. Evaluation uses other row lengths than training, and without
        this setting could not reuse the memory that training has freed.
    CUDA_DEVICE_MAX_CONNECTIONS=1
        The device has a single hardware queue, so it starts kernels in the order of their launches. With tensor
        parallelism, communication is launched before the matmul that it should overlap with. With more queues the
        matmul could start first and delay the communication.

Values in `cluster.environment` take precedence. Variables that depend on the network, such as NCCL's number of queue
pairs, are set in the configuration files of clusters (configs/cluster).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time this import would need packages whose presence `hybridtron doctor` checks
    from hybridtron.config.schema import ParallelConfig


@dataclass(frozen=True)
class WantedVariable:
    """An environment variable with its value and purpose."""

    name: str
    value: str
    purpose: str


ALLOCATOR = WantedVariable(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "so that rows of different lengths can reuse freed memory"
)
ONE_QUEUE = WantedVariable(
    "CUDA_DEVICE_MAX_CONNECTIONS", "1", "so that communication overlaps with matmuls if parallel.tensor is at least 2"
)


def wanted_variables(parallel: ParallelConfig) -> dict[str, str]:
    """Return the environment variables for a parallel layout with one GPU for each process."""
    if parallel.tensor > 1:
        variables = (ALLOCATOR, ONE_QUEUE)
    else:
        variables = (ALLOCATOR,)
    return {variable.name: variable.value for variable in variables}
