"""The cluster that a run is submitted to, as a configuration group.

Training itself reads only the peak and the memory of a device, for MFU and memory plans. All other keys go into the
script of a SLURM job; `docs/slurm.md` explains how to write a file for your own cluster. Secrets do not belong here,
since every run's config.yaml holds these values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from hybridtron.limits import above, at_least, matching


class Runtime(StrEnum):
    """Program that starts containers."""

    pyxis = "pyxis"  # srun itself, by SLURM's plugin of this name, with Enroot
    apptainer = "apptainer"


class LostNode(StrEnum):
    """Reaction to lost nodes: wait for others, or continue with fewer."""

    wait = "wait"  # for other nodes, in the queue
    smaller = "smaller"  # it continues with fewer nodes, where the layout allows it


@dataclass
class ContainerConfig:
    """The container that every process runs in; no container without an image."""

    image: str | None = None  # path or URL of the image; null: no container
    runtime: Runtime = Runtime.pyxis  # program that starts it: pyxis (srun with Enroot) or apptainer
    # OUTSIDE:INSIDE; the run's folder and the working folder are always mounted
    mounts: Annotated[list[str], matching(r"/[^:,]*:/[^:,]*(:\w+)?", "/OUTSIDE:/INSIDE")] = field(default_factory=list)


@dataclass
class ChecksConfig:
    """Checks that every node must pass before a run starts on it."""

    disk_gb: Annotated[float, at_least(0)] = 10.0  # free space that a node needs where the run is written
    shared_gb: Annotated[float, at_least(0)] = 1.0  # free space in /dev/shm, which NCCL and loaders use
    clock_s: Annotated[float, above(0)] = 5.0  # largest deviation of a node's clock from the median
    fabric: list[str] = field(default_factory=list)  # devices of /sys/class/infiniband that must have an active port
    # a small all-reduce inside each node and over all; it also shows that all ranks can connect
    all_reduce: bool = True
    # minimum bus bandwidth of that all-reduce inside a node; null: any
    node_gb_per_s: Annotated[float | None, above(0)] = None
    network_gb_per_s: Annotated[float | None, above(0)] = None  # minimum bus bandwidth over all nodes; null: any
    timeout: Annotated[int, at_least(1)] = 300  # time limit of all checks together, in seconds
    drain: bool = False  # take a bad node out of service for all users; needs an operator's rights


@dataclass
class ClusterConfig:
    """A cluster as jobs see it. Null means SLURM's own default, or an unknown number."""

    name: str = "local"  # name of the cluster in tables
    # dense bf16 peak of one device; MFU is relative to it in FP8 too
    peak_tflops: Annotated[float | None, above(0)] = None
    memory_gb: Annotated[float | None, above(0)] = None  # memory of one device
    partition: str | None = None  # sbatch's --partition; null: SLURM's default
    account: str | None = None  # sbatch's --account
    qos: str | None = None  # sbatch's --qos
    time: str = "24:00:00"  # time limit of one job; a run that needs more is requeued
    # seconds before that limit at which a run is asked to save and stop
    stop_before: Annotated[int, at_least(1)] = 300
    gpus_per_node: Annotated[int, at_least(0)] = 0  # GPUs of a node, with one process each; 0: no GPUs
    processes_per_node: Annotated[int, at_least(1)] = 1  # processes of a node without GPUs
    # cores of each process, including those for its loader's workers
    cpus_per_process: Annotated[int | None, at_least(1)] = None
    memory: str | None = None  # memory of a node, as sbatch's --mem takes it; "0": all of it
    # further sbatch options: --constraint=h100
    sbatch: Annotated[list[str], matching("-.*", "an option such as --constraint=h100")] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # modules for `module load`
    venv: str | None = None  # virtual environment that is activated before anything runs
    python: str = "python"  # the interpreter that is started
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)  # exported variables, such as NCCL's and the network's
    requeue: bool = True  # false where jobs must not requeue themselves: then use --chain
    # wait: for other nodes, in the queue; smaller: continue with fewer nodes where the layout allows it
    on_lost_node: LostNode = LostNode.wait
    checks: ChecksConfig = field(default_factory=ChecksConfig)

    @property
    def processes(self) -> int:
        """Number of processes on one node."""
        return self.gpus_per_node or self.processes_per_node
