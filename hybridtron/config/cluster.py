"""The machine that a run is submitted to: a group of the configuration of which training itself reads two numbers.

Those two (the peak and the memory of a device) are for MFU and memory plans. Everything else goes into the script of a
SLURM job; `docs/slurm.md` explains how to write a file for your own cluster. No secret belongs here, since every run's
config.yaml holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from hybridtron.limits import above, at_least, matching


class Runtime(StrEnum):
    """What starts containers."""

    pyxis = "pyxis"  # srun itself, by SLURM's plugin of this name, with Enroot
    apptainer = "apptainer"


class LostNode(StrEnum):
    """What a job does when some of its nodes are no longer usable."""

    wait = "wait"  # for other nodes, in the queue
    smaller = "smaller"  # it continues with fewer nodes, where the layout allows it


@dataclass
class ContainerConfig:
    """The container that every process runs in; none without an image."""

    image: str | None = None  # path or URL of the image; null: no container
    runtime: Runtime = Runtime.pyxis  # what starts it: pyxis (srun with Enroot) or apptainer
    # OUTSIDE:INSIDE; the run's folder and the working folder are always mounted
    mounts: Annotated[list[str], matching(r"/[^:,]*:/[^:,]*(:\w+)?", "/OUTSIDE:/INSIDE")] = field(default_factory=list)


@dataclass
class ChecksConfig:
    """What every node must show before a run starts on it."""

    disk_gb: float = 10.0  # free space that a node needs where the run is written
    shared_gb: float = 1.0  # free space in /dev/shm, which NCCL and loaders use
    clock_s: float = 5.0  # largest deviation of a node's clock from the median
    fabric: list[str] = field(default_factory=list)  # devices of /sys/class/infiniband that must have an active port
    # a small all-reduce inside each node and over all; it also shows that all ranks can connect
    all_reduce: bool = True
    node_gb_per_s: float | None = None  # least bus bandwidth of it inside a node
    network_gb_per_s: float | None = None  # least bus bandwidth over all nodes
    timeout: int = 300  # seconds for all checks
    drain: bool = False  # take a bad node out of service for everybody; needs an operator's rights


@dataclass
class ClusterConfig:
    """A cluster as jobs see it; null where SLURM's own default applies, or where a number is unknown."""

    name: str = "local"  # appears in tables
    # dense bf16 peak of one device; MFU is relative to it in FP8 too
    peak_tflops: Annotated[float | None, above(0)] = None
    memory_gb: Annotated[float | None, above(0)] = None  # memory of one device
    partition: str | None = None  # as sbatch takes it; null: SLURM's default
    account: str | None = None  # as sbatch takes it
    qos: str | None = None  # as sbatch takes it
    time: str = "24:00:00"  # limit of one job; a run that needs more is requeued
    # seconds before that limit at which a run is asked to save and stop
    stop_before: Annotated[int, at_least(1)] = 300
    gpus_per_node: Annotated[int, at_least(0)] = 0  # one process each; 0: no GPUs
    processes_per_node: Annotated[int, at_least(1)] = 1  # processes of a node without GPUs
    # cores of each process, its loader's workers included
    cpus_per_process: Annotated[int | None, at_least(1)] = None
    memory: str | None = None  # of a node, as sbatch's --mem takes it; "0": all of it
    # further options: --constraint=h100
    sbatch: Annotated[list[str], matching("-.*", "an option such as --constraint=h100")] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # for `module load`
    venv: str | None = None  # activated before anything runs
    python: str = "python"  # the interpreter that is started
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)  # variables that are exported: NCCL's and the network's
    requeue: bool = True  # false where jobs must not requeue themselves: then use --chain
    # wait: for other nodes, in the queue; smaller: continue with fewer nodes where the layout allows it
    on_lost_node: LostNode = LostNode.wait
    checks: ChecksConfig = field(default_factory=ChecksConfig)

    @property
    def processes(self) -> int:
        """On one node."""
        return self.gpus_per_node or self.processes_per_node
