"""The machine that a run is submitted to: a group of the configuration of which training itself reads two numbers.

Those two (the peak and the memory of a device) are for MFU and memory plans. All else is what `slurm/submit.py` writes
into a job's script; what these keys mean, one by one, and how to write a file for one's own cluster, is told in
`slurm/README.md`. No secret belongs here, since every run's config.yaml holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Runtime(StrEnum):
    """What starts containers."""

    pyxis = "pyxis"  # srun itself, by SLURM's plugin of this name, with Enroot
    apptainer = "apptainer"


class LostNode(StrEnum):
    """What a job does that can't have all its nodes any more."""

    wait = "wait"  # for others, in the queue
    smaller = "smaller"  # it goes on with fewer, where the layout can be shared out over them


@dataclass
class ContainerConfig:
    """The container that every process runs in; none without an image."""

    image: str | None = None
    runtime: Runtime = Runtime.pyxis
    mounts: list[str] = field(default_factory=list)  # OUTSIDE:INSIDE; the run's folder and the working one are mounted


@dataclass
class ChecksConfig:
    """What every node must show before a run starts on it."""

    disk_gb: float = 10.0  # free where the run is written
    shared_gb: float = 1.0  # free in /dev/shm, which NCCL and loaders use
    clock_s: float = 5.0  # from the median of all nodes
    fabric: list[str] = field(default_factory=list)  # devices of /sys/class/infiniband that must have an active port
    all_reduce: bool = True  # a small one inside each node, and over all: it also shows that all ranks can meet
    node_gb_per_s: float | None = None  # the least bus bandwidth of it inside a node
    network_gb_per_s: float | None = None  # and over all nodes
    timeout: int = 300  # seconds for all of this
    drain: bool = False  # take a bad node out of service for everybody; needs an operator's rights


@dataclass
class ClusterConfig:
    """A cluster as jobs see it; null where SLURM's own default holds, or where a number is unknown."""

    name: str = "local"
    peak_tflops: float | None = None  # dense bf16, per device; MFU is told by it in FP8 too
    memory_gb: float | None = None  # per device
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "24:00:00"  # limit of one job; a run that needs more is requeued
    stop_before: int = 300  # seconds before that at which a run is told to save and stop
    gpus_per_node: int = 0  # one process for each
    processes_per_node: int = 1  # where there are no GPUs
    cpus_per_process: int | None = None
    memory: str | None = None  # of a node, as sbatch's --mem takes it; "0": all that it has
    sbatch: list[str] = field(default_factory=list)  # further options: --constraint=h100
    modules: list[str] = field(default_factory=list)  # for `module load`
    venv: str | None = None  # activated before anything runs
    python: str = "python"
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)  # exported: NCCL's and the network's variables
    requeue: bool = True  # false where jobs must not requeue themselves: then use --chain
    on_lost_node: LostNode = LostNode.wait
    checks: ChecksConfig = field(default_factory=ChecksConfig)

    @property
    def processes(self) -> int:
        """On one node."""
        return self.gpus_per_node or self.processes_per_node
