"""A sweep as array jobs of SLURM: every run on one GPU, and behind them, as a further array, those that start from one.

The script of an array is a head with its own values, and then `array.sh`. It can be read, edited and submitted again.
Runs that have finished are left out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridtron.cluster import scheduler
from hybridtron.cluster.job import SlurmJob, commands, directives, software, steps
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
from hybridtron.cluster.variables import wanted_variables
from hybridtron.config.load import carried
from hybridtron.config.schema import Config
from hybridtron.config.weights import lacking_weights
from hybridtron.data.problems import data_problems
from hybridtron.problems import ConfigError, Problem, Unusable
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep, SweepRun
from hybridtron.train.records import write_whole

WHOLE_NODE = "--exclusive"


@dataclass(frozen=True)
class ArrayJob:
    """Runs that can begin together, or a command: `job` has what is the same for all elements."""

    job: SlurmJob
    elements: Mapping[str, Sequence[str]]  # a run's name -> its settings
    command: str = ""  # of a job that is no array

    @property
    def script_path(self) -> Path:
        return self.job.run_dir / "slurm" / f"{self.job.name}.sh"


def arrays_of(sweep: Sweep, folder: Folder, config: Config) -> list[ArrayJob]:
    """What is left of a sweep, stage by stage; `config` is that of a run, whose `cluster` counts for all."""
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
    """A command that is queued behind all of them."""
    return ArrayJob(_job_of(folder.path.absolute(), f"{folder.path.name}-then", config), {}, command)


def _stage(run: SweepRun, runs: Mapping[str, SweepRun]) -> int:
    return 0 if run.start is None else 1 + _stage(runs[run.start], runs)


def _job_of(path: Path, name: str, config: Config) -> SlurmJob:
    """One process with one GPU, where nodes have any: what is said of whole nodes is left out."""
    cluster = config.cluster
    environment = (wanted_variables(config.parallel) if cluster.gpus_per_node else {}) | cluster.environment
    shared = [option for option in cluster.sbatch if option != WHOLE_NODE]
    one = replace(
        cluster,
        gpus_per_node=min(1, cluster.gpus_per_node),
        processes_per_node=1,
        memory=None,
        sbatch=shared,
        environment=environment,
    )
    return SlurmJob(path, Path.cwd(), name, (), (1,), 0, one)


def problems(sweep: Sweep, arrays: Sequence[ArrayJob], configs: Mapping[str, Config]) -> list[Problem]:
    """What is wrong with these, and with the data of runs whose configuration is known, before anything is queued."""
    all_problems = [problem for run in sweep.runs for problem in password_problems(run.settings)]
    for config in configs.values():
        all_problems += [*lacking_weights(config), *data_problems(config)]
        all_problems += [*device_problems(config), *resume_problems(config.run.resume)]
    for array in arrays:
        all_problems += [*cluster_problems(array.job.cluster), *job_problems(array.job)]
    if (silence := scheduler.silence()) is not None:
        all_problems.append(Problem("cluster", f"can't be asked: {silence}"))
    elif arrays:
        all_problems += partition_problems(arrays[0].job.cluster, 1)
    return list(dict.fromkeys(all_problems))


def script(array: ArrayJob) -> str:
    """The text of it."""
    job, count = array.job, len(array.elements)
    given, what = directives(job), [f"# {count} runs, one an element."]
    if array.command:
        given["run.dir"], what = f"--output={job.run_dir}/logs/slurm-%j.txt", ["# What comes after the runs."]
    else:
        given |= {"array": f"--array=0-{count - 1}", "run.dir": f"--output={job.run_dir}/logs/slurm-%A_%a.txt"}
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in given.values()),
        *what,
        f"# Written by hybridtron sweep --slurm; may be edited, and submitted again: sbatch {array.script_path}",
        "# shellcheck disable=SC2016,SC2034,SC2054  # settings are quoted: the shell leaves $ and commas as they are",
        f"code={shlex.quote(str(job.run_dir / 'code'))}",
        "export PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH}",
        *(_command(array) if array.command else _elements(array)),
    ])  # fmt: skip


def _elements(array: ArrayJob) -> list[str]:
    """Which settings are whose, and what is done with them."""
    cases = [
        line
        for number, settings in enumerate(array.elements.values())
        for line in (f"  {number}) settings=(", *(f"    {shlex.quote(one)}" for one in settings), "  ) ;;")
    ]
    return [
        f"requeue={str(array.job.cluster.requeue).lower()}",
        f"alone=({shlex.join(commands(array.job)['alone'])})",
        "case $SLURM_ARRAY_TASK_ID in",
        *cases,
        "esac",
        *software(array.job.cluster),
        steps("array.sh"),
    ]


def _command(array: ArrayJob) -> list[str]:
    """In a shell, inside the container where there is one."""
    *inside, _python, _, _ = commands(array.job)["alone"]
    return [*software(array.job.cluster), f"exec {shlex.join([*inside, 'bash', '-c', array.command])}", ""]


def submit(sweep: Sweep, folder: Folder, arrays: Sequence[ArrayJob]) -> list[str]:
    """Write the scripts and queue them, each behind the one before. Returns the numbers of the jobs."""
    notes, jobs = notes_of(folder.path), list[str]()
    try:
        if (obstacle := under_way(folder.path, "sweep")) is not None:
            raise Unusable(obstacle)
        folder.record(sweep)
        notes.parent.mkdir(exist_ok=True)
        _, files = carried([setting for run in sweep.runs for setting in run.settings])
        copy_code(folder.path / "code", list(dict.fromkeys(files)))
        for array in arrays:
            write_whole(array.script_path, script(array))
            jobs.append(scheduler.submit(array.script_path, jobs[-1] if jobs else None))
            write_whole(notes, json.dumps({"jobs": jobs}))
    except SlurmError as error:
        submitted = f"; submitted before that, and still queued: {' '.join(jobs)}" if jobs else ""
        raise Unusable(f"{error}{submitted}") from error
    return jobs


def require(sweep: Sweep, arrays: Sequence[ArrayJob], configs: Mapping[str, Config]) -> None:
    """Raises ConfigError with all that is wrong."""
    if found := problems(sweep, arrays, configs):
        raise ConfigError(found)
