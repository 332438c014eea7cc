"""Problems of a job that can be found before it is queued, each with a cure."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridtron.cluster import scheduler
from hybridtron.cluster.job import PLAIN, SlurmJob, script, unusable
from hybridtron.cluster.scheduler import Partition, SlurmError
from hybridtron.config.choices import Precision
from hybridtron.config.cluster import ClusterConfig
from hybridtron.config.resolve import resolve
from hybridtron.config.saved import WITH_PASSWORD
from hybridtron.config.schema import Config
from hybridtron.problems import Problem, did_you_mean


def password_problems(settings: Sequence[str]) -> list[Problem]:
    """Report passwords in settings. Used for configurations that can't be loaded (yet)."""
    cure = "which would be written into the job's script: leave it in the environment that you submit from"
    leaking = [setting for setting in settings if WITH_PASSWORD.search(setting)]
    return [Problem(setting.partition("=")[0], "secret", f"holds a password, {cure}") for setting in leaking]


def cluster_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Report cluster settings that can't be written into a job script."""
    limit = scheduler.seconds(cluster.time)
    if limit is None:
        forms = "a limit such as 90 (minutes), 12:00:00 or 2-00:00:00"
        yield Problem("cluster.time", "malformed", f"is {cluster.time!r}, must be {forms}")
    elif cluster.stop_before >= limit:
        whole = f"cluster.time={cluster.time} is {limit} s in all"
        yield Problem("cluster.stop_before", "out-of-range", f"is {cluster.stop_before} s, but {whole}: use less")
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Problem("cluster.environment", "malformed", f"has {name!r}, which can't be the name of a variable")


def device_problems(config: Config) -> Iterator[Problem]:
    """Report a job without GPUs if its cluster or precision is for GPUs: it would run on CPUs."""
    cluster = config.cluster
    key = "cluster.gpus_per_node"
    if cluster.gpus_per_node:
        return
    if cluster.peak_tflops is not None:
        says = (
            f"cluster={cluster.name} says what a GPU does (peak_tflops={cluster.peak_tflops:g}), not how many there are"
        )
        cure = f"write {key}=8, or as many as a node has; or a cluster that says it; CPUs are cluster=local"
        yield Problem(key, "missing", f"is 0, so that the job would get no GPUs: {says}: {cure}")
        return
    precisions = [phase.precision for phase in resolve(config)]
    if precisions and not any(precision.name is Precision.fp32 or precision.emulate for precision in precisions):
        cure = f"write {key}=8, or as many as a node has; to train on CPUs write precision=fp32"
        yield Problem(
            key,
            "missing",
            f"is 0, so that the job would get no GPUs, which precision={precisions[0].name} is for: {cure}",
        )


def resume_problems(resume: str) -> Iterator[Problem]:
    """Report a value of run.resume other than `auto`, because it would apply to every start of the job."""
    if resume != "auto":
        if resume == "never":
            does = "begin from scratch"
        else:
            does = "resume there"
        cure = "use auto; another run.dir starts from scratch, and a checkpoint in its checkpoints/ is resumed from"
        yield Problem("run.resume", "unsupported", f"is {resume!r}, but each start of the job would {does}: {cure}")


def job_problems(job: SlurmJob) -> Iterator[Problem]:
    """Report values that can't be written into an #SBATCH line. Nothing can be quoted there."""
    for key, option in unusable(job).items():
        yield Problem(
            key, "malformed", f"gives {option!r}, but an #SBATCH line can only hold {PLAIN.pattern}: use another name"
        )


def queue_problems(job: SlurmJob, nodes: int, ask_sbatch: bool) -> Iterator[Problem]:
    """Report reasons why SLURM would never start a job.

    Limits of the partition are checked first. If they hold and `ask_sbatch` is set, sbatch checks the script itself.
    """
    problems = list(partition_problems(job.cluster, nodes))
    yield from problems
    if not ask_sbatch or problems:
        return
    try:
        _trial(job)
    except SlurmError as error:
        yield Problem("cluster", "unavailable", f"would not start this job: {error}")


def partition_problems(cluster: ClusterConfig, nodes: int) -> Iterator[Problem]:
    """Report reasons why the partition would not accept a job, or that SLURM can't be asked."""
    try:
        known = scheduler.partitions()
    except SlurmError as error:
        yield Problem("cluster", "unavailable", f"can't be asked: {error}")
        return
    yield from _partition_problems(cluster, nodes, _wanted(cluster, known), [partition.name for partition in known])


def _wanted(cluster: ClusterConfig, known: list[Partition]) -> Partition | None:
    """Return the partition that the job asks for, or the default partition; None if it does not exist."""
    default = cluster.partition is None
    return next(
        (
            partition
            for partition in known
            if (partition.is_default if default else partition.name == cluster.partition)
        ),
        None,
    )


def _partition_problems(
    cluster: ClusterConfig, nodes: int, wanted: Partition | None, names: list[str]
) -> Iterator[Problem]:
    if wanted is None:
        fault = "is null, and no partition is the default"
        if cluster.partition is not None:
            fault = f"is {cluster.partition!r}, which is not here{did_you_mean(cluster.partition, names)}"
        yield Problem("cluster.partition", "unknown-name", f"{fault}; here are: {', '.join(names)}")
        return
    if not wanted.is_up:
        yield Problem("cluster.partition", "unavailable", f"{wanted.name} is not up; here are: {', '.join(names)}")
    if nodes > wanted.nodes:
        yield Problem(
            "nodes",
            "does-not-fit",
            f"is {nodes}, but partition {wanted.name} has {wanted.nodes}: use at most {wanted.nodes}",
        )
    limit = scheduler.seconds(cluster.time)
    if limit is not None and wanted.time_s is not None and limit > wanted.time_s:
        longest = f"{wanted.time_s // 86400}-{time.strftime('%H:%M:%S', time.gmtime(wanted.time_s))}"
        above = f"is {cluster.time}, above the limit of partition {wanted.name}"
        yield Problem(
            "cluster.time", "out-of-range", f"{above}: use at most {longest}, the run is requeued until it has finished"
        )


def _trial(job: SlurmJob) -> None:
    """Let sbatch check the script without queueing it; sbatch reports one problem at a time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sh"
        path.write_text(script(job))
        scheduler.would_start(path)
