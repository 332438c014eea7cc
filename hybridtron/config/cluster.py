"""Types for the configuration's section `cluster`: the SLURM cluster to which a run is submitted.

Training reads only the peak FLOPS and the memory of a device, for MFU and memory plans, and the folder `stage`. All
other keys are used by `hybridtron submit` for the job script. `docs/slurm.md` explains how to write a file for your own
cluster. Do not put secrets here, since the values are stored in every run's config.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from hybridtron.limits import above, at_least, matching

GRES = r"[A-Za-z_][\w.-]*(:[A-Za-z_][\w.-]*)?"  # a resource's name, and its type


class Runtime(StrEnum):
    """Program that starts containers."""

    pyxis = "pyxis"  # a plugin of SLURM, which adds container options to srun
    apptainer = "apptainer"


class LostNode(StrEnum):
    """Reaction of a job to lost or bad nodes."""

    wait = "wait"  # wait in the queue for other nodes
    smaller = "smaller"  # continue with fewer nodes, if the parallel layout fits on them


@dataclass
class ContainerConfig:
    """The container for all processes. Without an image, no container is used."""

    image: str | None = None  # path or URL of the image; null: no container
    runtime: Runtime = Runtime.pyxis  # program that starts the container: pyxis (a plugin of srun) or apptainer
    # folders to mount, as OUTSIDE:INSIDE; the job's own folders are always mounted
    mounts: Annotated[list[str], matching(r"/[^:,]*:/[^:,]*(:\w+)?", "/OUTSIDE:/INSIDE")] = field(default_factory=list)


@dataclass
class ChecksConfig:
    """Checks that every node must pass before a run starts on it."""

    disk_gb: Annotated[float, at_least(0)] = 10.0  # minimum free space, in GB, of the disk with the run's folder
    shared_gb: Annotated[float, at_least(0)] = 1.0  # minimum free space, in GB, of /dev/shm
    # maximum difference, in seconds, between a node's clock and the median of all nodes' clocks
    clock_s: Annotated[float, above(0)] = 5.0
    # names of InfiniBand devices, as in /sys/class/infiniband, that must have an active port
    fabric: list[str] = field(default_factory=list)
    # run a small all-reduce inside each node and over all nodes; this also tests that all ranks can connect
    all_reduce: bool = True
    # minimum bus bandwidth, in GB/s, of the all-reduce inside a node; null: no minimum
    node_gb_per_s: Annotated[float | None, above(0)] = None
    # minimum bus bandwidth, in GB/s, of the all-reduce over all nodes; null: no minimum
    network_gb_per_s: Annotated[float | None, above(0)] = None
    timeout: Annotated[int, at_least(1)] = 300  # time limit of all checks together, in seconds
    drain: bool = False  # set bad nodes to SLURM's state DRAIN, for all users; needs operator rights


@dataclass
class ClusterConfig:
    """A SLURM cluster, its nodes, and options of its jobs. Null means SLURM's default, or an unknown value."""

    name: str = "local"  # name of the cluster in tables
    # peak rate of one device in TFLOPS, for dense bf16 matmuls; MFU is relative to this rate, even with FP8
    peak_tflops: Annotated[float | None, above(0)] = None
    memory_gb: Annotated[float | None, above(0)] = None  # memory of one device in GB
    partition: str | None = None  # sbatch's --partition; null: SLURM's default
    account: str | None = None  # sbatch's --account
    qos: str | None = None  # sbatch's --qos
    time: str = "24:00:00"  # time limit of one job; a run that needs more time is requeued
    # the run saves a checkpoint and stops this number of seconds before the time limit
    stop_before: Annotated[int, at_least(1)] = 300
    gpus_per_node: Annotated[int, at_least(0)] = 0  # GPUs of a node; each GPU gets one process; 0: no GPUs
    # name of the GPUs in sbatch's --gres, such as gpu or gpu:h100, for clusters that need --gres; null: --gpus-per-node
    gres: Annotated[str | None, matching(GRES, "a name without a count, such as gpu:h100")] = None
    processes_per_node: Annotated[int, at_least(1)] = 1  # processes of a node without GPUs
    # CPU cores of each process, including cores for the workers of its data loader
    cpus_per_process: Annotated[int | None, at_least(1)] = None
    memory: str | None = None  # sbatch's --mem: memory to allocate on each node; "0": all memory of the node
    # further options of sbatch, such as --constraint=h100
    sbatch: Annotated[list[str], matching("-.*", "an option such as --constraint=h100")] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # modules for `module load`
    venv: str | None = None  # path of a virtual environment to activate
    python: str = "python"  # command of the Python interpreter
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)  # environment variables, such as NCCL's
    # absolute path of a folder on each node's own disk, to which data are copied before ranks start; null: no copy
    stage: Annotated[str | None, matching(r"/[^:,]*", "an absolute path")] = None
    # absolute path of a folder that all nodes share, for compiled kernels of Triton, torch.compile and this package;
    # null: the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)
    cache: Annotated[str | None, matching(r"/[^:,]*", "an absolute path")] = None
    requeue: bool = True  # let jobs requeue themselves; false: use `hybridtron submit --chain`
    # wait: wait in the queue for other nodes; smaller: continue with fewer nodes, if the layout fits on them
    on_lost_node: LostNode = LostNode.wait
    # additional nodes of a job, which replace lost nodes inside the job (run.restarts)
    spares: Annotated[int, at_least(0)] = 0
    checks: ChecksConfig = field(default_factory=ChecksConfig)

    @property
    def processes(self) -> int:
        """Number of processes on one node."""
        return self.gpus_per_node or self.processes_per_node
