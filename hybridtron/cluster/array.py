"""A sweep as SLURM array jobs: every run gets one GPU.

A SLURM array job has elements, which run independently. Here each element trains one run in the sweep. Runs that start
from other runs' weights belong to a further array, which is queued after the array with the other runs. Finished runs
are left out.

An array's script begins with the array's own values. Then follows the text of `array.sh`, which all arrays share. Users
can read the script, edit it and submit it again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridtron.cluster import scheduler
from hybridtron.cluster.gpu_env import wanted_variables
from hybridtron.cluster.job import (
    SlurmJob,
    cache_of,
    commands,
    container_lines,
    directives,
    joined,
    one_process,
    opening,
    software,
    steps,
)
from hybridtron.cluster.problems import (
    cluster_problems,
    device_problems,
    job_problems,
    partition_problems,
    password_problems,
    resume_problems,
)
from hybridtron.cluster.scheduler import SlurmError
from hybridtron.cluster.submit import copy_code, notes_of, under_way
from hybridtron.config.load import carried
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.weights import lacking_weights
from hybridtron.data.problems import data_problems
from hybridtron.problems import ConfigError, Problem, Unusable
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep, SweepRun
from hybridtron.train.jsonl import write_whole


@dataclass(frozen=True)
class ArrayJob:
    """An array of runs that can start at the same time, or a job for a single command.

    job: the job's settings, shared by all elements
    elements: each run's name -> its settings for `hybridtron train`
    command: if not empty, the job runs this shell command in place of elements
    """

    job: SlurmJob
    elements: Mapping[str, Sequence[str]]
    command: str = ""

    @property
    def script_path(self) -> Path:
        return self.job.run_dir / "slurm" / f"{self.job.name}.sh"


def arrays_of(sweep: Sweep, folder: Folder, config: Config) -> list[ArrayJob]:
    """Group a sweep's unfinished runs into arrays, one for each stage.

    Runs in stage 0 start from scratch, and runs in stage n + 1 start from the weights of runs in stage n. All arrays
    use the section `cluster` in `config`.
    """
    stages: dict[int, dict[str, Sequence[str]]] = {}
    runs = {run.name: run for run in sweep.runs}
    root = Folder(folder.path.absolute())
    for run in sweep.runs:
        if not folder.is_finished(run.name):
            stages.setdefault(_stage(run, runs), {})[run.name], _ = carried(root.settings(run))
    return [
        ArrayJob(_job_of(root.path, f"{folder.path.name}-{stage + 1}", config), elements)
        for stage, elements in sorted(stages.items())
    ]


def last_of(folder: Folder, config: Config, command: str) -> ArrayJob:
    """Build the job that runs a command after all arrays."""
    return ArrayJob(_job_of(folder.path.absolute(), f"{folder.path.name}-then", config), {}, command)


def _stage(run: SweepRun, runs: Mapping[str, SweepRun]) -> int:
    """Return a run's stage: 0, or if the run starts from another run's weights, 1 + the other run's stage."""
    if run.start is None:
        return 0
    return 1 + _stage(runs[run.start], runs)


def _job_of(path: Path, name: str, config: Config) -> SlurmJob:
    """Build a job for a single process, with one GPU if nodes have GPUs."""
    cluster = replace(one_process(config.cluster), memory=None)  # runs share a node, and its memory
    if cluster.gpus_per_node:
        cluster = replace(cluster, environment=wanted_variables(config.parallel) | cluster.environment)
    return SlurmJob(path, Path.cwd(), name, (), (1,), 0, cluster, cache_of(cluster))


def problems(sweep: Sweep, arrays: Sequence[ArrayJob], plans: Mapping[str, RunPlan]) -> list[Problem]:
    """List all problems with arrays, configurations, data and SLURM. Call this function before anything is queued.

    `plans` maps names of runs to plans. It lacks runs whose configuration is not known yet.
    """
    all_problems = [problem for run in sweep.runs for problem in password_problems(run.settings)]
    for plan in plans.values():
        all_problems += [*lacking_weights(plan.config), *data_problems(plan)]
        all_problems += [*device_problems(plan), *resume_problems(plan.config.run.resume)]
    for array in arrays:
        all_problems += [*cluster_problems(array.job.cluster), *job_problems(array.job)]
    if (silence := scheduler.silence()) is not None:
        all_problems.append(Problem("cluster", "unavailable", f"SLURM does not answer: {silence}"))
    elif arrays:
        all_problems += partition_problems(arrays[0].job.cluster, 1)
    return list(dict.fromkeys(all_problems))


def script(array: ArrayJob) -> str:
    """Return an array's script."""
    job = array.job
    count = len(array.elements)
    options = directives(job)
    comments = [f"# {count} runs, one for each element."]
    if array.command:
        options["run.dir"] = f"--output={job.run_dir}/logs/slurm-%j.txt"
        comments = ["# A command to run after the runs have ended."]
    else:
        options |= {"array": f"--array=0-{count - 1}", "run.dir": f"--output={job.run_dir}/logs/slurm-%A_%a.txt"}
    comments.append(
        f"# Written by hybridtron sweep --slurm. Users may edit this script and submit it: sbatch {array.script_path}"
    )
    rest = _command(array) if array.command else _elements(array)
    return "\n".join([*opening(job, options, comments), *rest])


def _elements(array: ArrayJob) -> list[str]:
    """Return the script's lines that choose the current element's settings and train its run."""
    cases = [
        line
        for number, settings in enumerate(array.elements.values())
        for line in (f"  {number}) settings=(", *(f"    {shlex.quote(setting)}" for setting in settings), "  ) ;;")
    ]
    return [
        f"requeue={str(array.job.cluster.requeue).lower()}",
        *container_lines(array.job),
        f"alone=({joined(commands(array.job)['alone'])})",
        "case $SLURM_ARRAY_TASK_ID in",
        *cases,
        "esac",
        *software(array.job),
        steps("array.sh"),
    ]


def _command(array: ArrayJob) -> list[str]:
    """Return the script's lines that run the command in a shell, inside the container if there is one."""
    *container_command, _python, _, _ = commands(array.job)["alone"]
    command = joined([*container_command, "bash", "-c", array.command])
    return [*container_lines(array.job), *software(array.job), f"exec {command}", ""]


def submit(sweep: Sweep, folder: Folder, arrays: Sequence[ArrayJob]) -> list[str]:
    """Write the scripts and queue them in order. Returns the job numbers.

    Each job starts after the previous job has ended.

    Raises Unusable if earlier jobs of this sweep have not ended, or if SLURM refuses a job.
    """
    notes = notes_of(folder.path)
    jobs = list[str]()
    try:
        if (obstacle := under_way(folder.path, "sweep")) is not None:
            raise Unusable(obstacle, code="in-use")
        folder.record(sweep)
        notes.parent.mkdir(exist_ok=True)
        _, files = carried([setting for run in sweep.runs for setting in run.settings])
        copy_code(folder.path / "code", list(dict.fromkeys(files)))
        for array in arrays:
            write_whole(array.script_path, script(array))
            jobs.append(scheduler.submit(array.script_path, jobs[-1] if jobs else None))
            write_whole(notes, json.dumps({"jobs": jobs}))
    except SlurmError as error:
        if jobs:
            submitted = f"; jobs submitted before this error are still queued: {' '.join(jobs)}"
        else:
            submitted = ""
        raise Unusable(f"{error}{submitted}", code="unavailable") from error
    return jobs


def require(sweep: Sweep, arrays: Sequence[ArrayJob], plans: Mapping[str, RunPlan]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if array_problems := problems(sweep, arrays, plans):
        raise ConfigError(array_problems)
