"""Variables of the environment that a layout wants on GPUs: set by `hybridtron submit`, named by `hybridtron doctor`.

    PYTORCH_CUDA_ALLOC_CONF      segments of the allocator grow: evaluation reads rows of other lengths than training,
                                 and blocks that fit one length are no use to the other
    CUDA_DEVICE_MAX_CONNECTIONS  one queue to the device: what tensor-parallel ranks exchange begins before the product
                                 that was asked for after it, and hides behind that

What `cluster.environment` says of a variable goes first. How many queue pairs NCCL takes is a matter of the network, so
it stands in files of clusters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # doctor needs no package of those that it looks for
    from hybridtron.config.schema import ParallelConfig


@dataclass(frozen=True)
class WantedVariable:
    """One variable, the value that is wanted, and for what."""

    name: str
    value: str
    purpose: str


ALLOCATOR = WantedVariable(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "rows of several lengths share memory"
)
ONE_QUEUE = WantedVariable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "for parallel.tensor of at least 2: hides its traffic")


def wanted_variables(parallel: ParallelConfig) -> dict[str, str]:
    """What processes with a GPU each should find in their environment."""
    wanted = (ALLOCATOR, ONE_QUEUE) if parallel.tensor > 1 else (ALLOCATOR,)
    return {variable.name: variable.value for variable in wanted}
