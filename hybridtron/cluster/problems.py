"""Problems of a SLURM job that can be found before the job is queued, each with a fix.

Each problem has the configuration key that the user should change.
"""

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
from hybridtron.config.resolve import RunPlan
from hybridtron.config.saved import WITH_PASSWORD, named_start
from hybridtron.config.schema import Config
from hybridtron.problems import Problem, did_you_mean


def password_problems(settings: Sequence[str]) -> list[Problem]:
    """Return a problem for each setting that contains a password.

    Settings are texts such as `key=value`, so that settings which can't be loaded are checked too.
    """
    cure = "which would be written into the job's script: set the password as an environment variable before you submit"
    leaking = [setting for setting in settings if WITH_PASSWORD.search(setting)]
    return [Problem(setting.partition("=")[0], "secret", f"contains a password, {cure}") for setting in leaking]


def cluster_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield problems of `cluster.time`, `cluster.stop_before` and `cluster.environment`."""
    limit = scheduler.seconds(cluster.time)
    if limit is None:
        forms = "a limit such as 90 (minutes), 12:00:00 or 2-00:00:00"
        yield Problem("cluster.time", "malformed", f"is {cluster.time!r}, must be {forms}")
    elif cluster.stop_before >= limit:
        whole = f"cluster.time={cluster.time} is only {limit} s"
        yield Problem(
            "cluster.stop_before", "out-of-range", f"is {cluster.stop_before} s, but {whole}: use a smaller value"
        )
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Problem(
                "cluster.environment",
                "malformed",
                f"has {name!r}, which is not a valid name of a variable: use letters, digits and _",
            )


def device_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield a problem if the job would run on CPUs although its cluster or precision is meant for GPUs."""
    cluster = plan.config.cluster
    key = "cluster.gpus_per_node"
    if cluster.gpus_per_node:
        return
    if cluster.peak_tflops is not None:
        says = (
            f"cluster={cluster.name} describes a GPU (peak_tflops={cluster.peak_tflops:g}), but not the GPUs of a node"
        )
        cure = f"set {key} to the GPUs of a node, such as {key}=8, or use another cluster; for CPUs use cluster=local"
        yield Problem(key, "missing", f"is 0, so the job would get no GPUs: {says}: {cure}")
        return
    precisions = [phase.precision for phase in plan.phases]
    if precisions and not any(precision.name is Precision.fp32 or precision.emulate for precision in precisions):
        cure = f"set {key} to the GPUs of a node, such as {key}=8; to train on CPUs use precision=fp32"
        yield Problem(
            key,
            "missing",
            f"is 0, so the job would get no GPUs, but precision={precisions[0].name} is meant for GPUs: {cure}",
        )


def resume_problems(resume: str) -> Iterator[Problem]:
    """Yield a problem if `run.resume` is not `auto`, because the value would apply to every start of the job."""
    if resume != "auto":
        if resume == "never":
            does = "train from scratch"
        else:
            does = "resume from that checkpoint"
        cure = (
            "use auto; to start from scratch set another run.dir; to resume, copy a checkpoint into run.dir/checkpoints"
        )
        yield Problem("run.resume", "unsupported", f"is {resume!r}, so every start of the job would {does}: {cure}")


def spare_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if the job has spare nodes, but its processes never start again inside the job."""
    if config.cluster.spares and config.run.restarts == 0:
        cure = "set run.restarts to at least 1, or cluster.spares=0"
        why = f"is {config.cluster.spares}, but run.restarts=0, so that no spare node would ever be used"
        yield Problem("cluster.spares", "no-effect", f"{why}: {cure}")


def folder_problems(run_dir: Path) -> Iterator[Problem]:
    """Yield a problem if the last start in the run's folder resumed from a path, and wrote no checkpoint of its own.

    The job would train from scratch: it resumes only from checkpoints in the folder, and the folder's configuration,
    which names the path, is overwritten when a job is submitted.
    """
    start = named_start(run_dir)
    if start is None or any((run_dir / "checkpoints").glob("step-*")):
        return
    why = f"is {run_dir}, which was started from {start} and has no checkpoint of its own yet"
    cure = f"copy {start} into {run_dir / 'checkpoints'}, or set another run.dir to start from scratch"
    yield Problem("run.dir", "conflict", f"{why}, so the job would start from scratch: {cure}")


def job_problems(job: SlurmJob) -> Iterator[Problem]:
    """Yield problems for values that can't be written into an #SBATCH line. Values can't be quoted there."""
    for key, option in unusable(job).items():
        yield Problem(
            key,
            "malformed",
            f"gives {option!r}, but an #SBATCH line can contain only {PLAIN.pattern}: use another name",
        )


def queue_problems(job: SlurmJob, nodes: int, ask_sbatch: bool) -> Iterator[Problem]:
    """Yield reasons why SLURM would never start a job.

    First the partition's limits are checked. If the job is within the limits and `ask_sbatch` is true, `sbatch
    --test-only` checks the script.
    """
    problems = list(partition_problems(job.cluster, nodes))
    yield from problems
    if ask_sbatch and not problems:
        yield from trial_problems(script(job))


def trial_problems(text: str) -> Iterator[Problem]:
    """Yield the problem that `sbatch --test-only` reports for a script, without queueing the job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sh"
        path.write_text(text)
        try:
            scheduler.would_start(path)
        except SlurmError as error:
            yield Problem("cluster", "unavailable", f"SLURM would not start this job: {error}")


def partition_problems(cluster: ClusterConfig, nodes: int) -> Iterator[Problem]:
    """Yield reasons why the partition would not accept a job, or the reason why SLURM can't be asked."""
    try:
        partitions = scheduler.partitions()
    except SlurmError as error:
        yield Problem("cluster", "unavailable", f"SLURM does not answer: {error}")
        return
    yield from _partition_problems(
        cluster, nodes, _wanted(cluster, partitions), [partition.name for partition in partitions]
    )


def _wanted(cluster: ClusterConfig, partitions: list[Partition]) -> Partition | None:
    """Return the partition that `cluster.partition` names (null: SLURM's default); None if it does not exist."""
    default = cluster.partition is None
    return next(
        (
            partition
            for partition in partitions
            if (partition.is_default if default else partition.name == cluster.partition)
        ),
        None,
    )


def _partition_problems(
    cluster: ClusterConfig, nodes: int, wanted: Partition | None, names: list[str]
) -> Iterator[Problem]:
    if wanted is None:
        fault = "is null, and SLURM has no default partition"
        if cluster.partition is not None:
            fault = f"is {cluster.partition!r}, which SLURM does not have{did_you_mean(cluster.partition, names)}"
        yield Problem("cluster.partition", "unknown-name", f"{fault}; use one of {', '.join(names)}")
        return
    if not wanted.is_up:
        yield Problem(
            "cluster.partition", "unavailable", f"{wanted.name} is not up; the partitions are {', '.join(names)}"
        )
    if nodes > wanted.nodes:
        yield Problem(
            "nodes",
            "does-not-fit",
            f"is {nodes}, but partition {wanted.name} has {wanted.nodes} nodes: use at most {wanted.nodes}",
        )
    limit = scheduler.seconds(cluster.time)
    if limit is not None and wanted.time_s is not None and limit > wanted.time_s:
        longest = f"{wanted.time_s // 86400}-{time.strftime('%H:%M:%S', time.gmtime(wanted.time_s))}"
        above = f"is {cluster.time}, above the limit of partition {wanted.name}"
        yield Problem(
            "cluster.time",
            "out-of-range",
            f"{above}: use at most {longest}; the job is requeued until the run has finished",
        )
