"""Environment variables that a layout needs on GPUs. `hybridtron submit` sets them, and `hybridtron doctor` names them.

    PYTORCH_CUDA_ALLOC_CONF      expandable segments: evaluation reads rows of other lengths than training, and memory
                                 blocks sized for one length could not be used for the other
    CUDA_DEVICE_MAX_CONNECTIONS  one queue to the device: communication between tensor-parallel ranks then starts
                                 before the matrix product that was launched after it, and overlaps with it

Values in `cluster.environment` take precedence. NCCL's number of queue pairs depends on the network, so it is set in
the clusters' own configuration files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # doctor must import this without the packages that it checks for
    from hybridtron.config.schema import ParallelConfig


@dataclass(frozen=True)
class WantedVariable:
    """An environment variable with its value and purpose."""

    name: str
    value: str
    purpose: str


ALLOCATOR = WantedVariable(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "rows of several lengths share memory"
)
ONE_QUEUE = WantedVariable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "for parallel.tensor of at least 2: hides its traffic")


def wanted_variables(parallel: ParallelConfig) -> dict[str, str]:
    """Return the variables, with their values, for processes that have one GPU each."""
    if parallel.tensor > 1:
        variables = (ALLOCATOR, ONE_QUEUE)
    else:
        variables = (ALLOCATOR,)
    return {variable.name: variable.value for variable in variables}
