"""Submit a run to SLURM: hybridtron submit recipe=samba_421m cluster=h100_infiniband nodes=8 [key=value ...]

The command takes the arguments of `hybridtron train`, and `nodes=N`. It works in three steps:

1. Check everything that can be checked in advance, and report all problems together.
2. Write into the run's folder: a copy of the code with the user's own configuration files (code/), the resolved
   configuration (config.yaml) and the job script (slurm/job.sh).
3. Submit the script with sbatch. If the folder contains an unfinished run, the job resumes this run.

Options:

    --dry-run    print the script, but write and submit nothing; missing data are a warning and not an error
    --chain K    submit K jobs, each of which starts after the previous job has ended; a job ends immediately if the run
                 has finished
    --then C     submit a follow-up job, which starts if the run has finished, and runs the command C: evaluate or
                 export; may be repeated: each follow-up job starts if the previous job has succeeded

Before anything is queued, the command prints the run's steps, tokens, hours and number of jobs to stderr.

The job inherits the environment variables with which this command runs. They are not stored in the script. The command
does not import torch. Exit codes:

    0   all jobs are submitted, or the script is printed (--dry-run)
    1   SLURM refused a job or did not answer, or earlier jobs of the run's folder have not ended
    2   step 1 found problems
"""

from __future__ import annotations

import json
import math
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridtron.cluster import scheduler, then
from hybridtron.cluster.estimate import estimate
from hybridtron.cluster.gpu_env import wanted_variables
from hybridtron.cluster.job import SlurmJob, cache_of, script
from hybridtron.cluster.problems import (
    cluster_problems,
    device_problems,
    folder_problems,
    job_problems,
    password_problems,
    queue_problems,
    resume_problems,
    spare_problems,
    trial_problems,
)
from hybridtron.cluster.scheduler import SlurmError
from hybridtron.cluster.then import NAMES, FollowUp, follow_ups, then_problems
from hybridtron.config.check import check, warnings
from hybridtron.config.checks.parallel import parallel_problems
from hybridtron.config.cluster import LostNode
from hybridtron.config.load import carried, choices_of, load, to_yaml
from hybridtron.config.outside import OutsideFile, copy_into, own_folder
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.weights import lacking_weights
from hybridtron.data.problems import data_problems
from hybridtron.problems import CommandParser, ConfigError, Problem
from hybridtron.requirements import PROJECT
from hybridtron.resources import PACKAGE, git_output, shipped
from hybridtron.train.hooks import load_hooks
from hybridtron.train.jsonl import read_record

TOGETHER_S = 180
RESTARTS = 3  # a requeued job waits in the queue, so a job first starts its processes again by itself
NOT_WHOLE = "h100 describes only a GPU: with h100 also set cluster.gpus_per_node and cluster.partition."


def main(arguments: list[str]) -> int:
    """Check the configuration, write the run's folder and submit the job. Returns the exit code."""
    parser = CommandParser(
        prog="hybridtron submit", description="Submit a run to SLURM.", epilog=f"clusters: {_clusters()}. {NOT_WHOLE}"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`, and nodes=N"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, write and submit nothing")
    parser.add_argument("--chain", type=int, default=1, metavar="K", help="submit K jobs, which run one after another")
    parser.add_argument(
        "--then", action="append", default=[], metavar="COMMAND", help=f"when the run has finished: {', '.join(NAMES)}"
    )
    options = parser.parse_intermixed_args(arguments)
    plan, job = plan_job(options.settings, options.chain, options.dry_run, options.then)
    after = follow_ups(options.then, job)
    # data problems are only warnings in a dry run; otherwise `plan_job` has already raised them, so this list is empty
    data = [f"{problem.key}  {problem.message}" for problem in data_problems(plan)]
    for warning in [*warnings(plan), *data]:
        print(f"warning: {warning}", file=sys.stderr)
    for line in estimate(plan, job, options.chain):
        print(f"plan: {line}", file=sys.stderr)  # stdout has only the script
    if options.dry_run:
        print(script(job), end="")
        for follow_up in after:
            print(f"\n{then.script(follow_up)}", end="")
        return 0
    return submit(plan.config, job, options.chain, after)


def plan_job(
    settings: Sequence[str], chain: int = 1, dry_run: bool = False, commands: Sequence[str] = ()
) -> tuple[RunPlan, SlurmJob]:
    """Build the run's plan and the job from `key=value` settings. Raises ConfigError with all problems together.

    commands: commands of follow-up jobs
    """
    node_counts = [setting.removeprefix("nodes=") for setting in settings if setting.startswith("nodes=")]
    train_settings = [setting for setting in settings if not setting.startswith("nodes=")]
    problems = [
        Problem("nodes", "out-of-range", f"is {text!r}, must be a whole number of at least 1")
        for text in node_counts
        if not (text.isdecimal() and int(text) >= 1)
    ]
    if node_counts and not problems:
        nodes = int(node_counts[-1])
    else:
        nodes = 1
    if chain < 1:
        problems.append(Problem("--chain", "out-of-range", f"is {chain}, must be at least 1"))
    try:
        config = load(train_settings)
    except ConfigError as error:
        raise ConfigError([*problems, *password_problems(train_settings), *error.problems]) from None
    config.run.dir = str(Path(config.run.dir).absolute())
    plan = RunPlan.of(config)
    job = job_of(plan, train_settings, nodes)
    problems += check(plan, nodes * config.cluster.processes)
    problems += [*lacking_weights(config), *load_hooks(config.run.hooks)[1], *spare_problems(config)]
    if not dry_run:  # a dry run may happen on a machine without the data
        problems += data_problems(plan)
    problems += [*cluster_problems(config.cluster), *device_problems(plan), *resume_problems(config.run.resume)]
    problems += [*folder_problems(job.run_dir), *job_problems(job), *then_problems(commands, job)]
    if (silence := scheduler.silence()) is None:
        problems += queue_problems(job, nodes + config.cluster.spares, ask_sbatch=not problems)
        if not problems:
            problems += [problem for item in follow_ups(commands, job) for problem in trial_problems(then.script(item))]
    elif not dry_run:
        problems.append(Problem("cluster", "unavailable", f"SLURM does not answer: {silence}"))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return plan, job


def job_of(plan: RunPlan, settings: Sequence[str], nodes: int) -> SlurmJob:
    """Build the job for a number of nodes.

    With `cluster.on_lost_node=smaller`, the job may also run on any smaller number of nodes that fits the parallel
    layout of every phase.
    """
    config = plan.config
    cluster = config.cluster
    if cluster.gpus_per_node:
        cluster = replace(cluster, environment=wanted_variables(config.parallel) | cluster.environment)
    if cluster.on_lost_node is LostNode.smaller and cluster.processes >= 1:
        fewer = range(1, nodes)
    else:
        fewer = ()
    arguments, files = carried(settings)
    restarts = config.run.restarts
    if restarts is None:
        restarts = RESTARTS
        arguments = [*arguments, f"run.restarts={restarts}"]
    fitting = [n for n in fewer if not any(any(parallel_problems(item, n * cluster.processes)) for item in plan.phases)]
    return SlurmJob(
        run_dir=Path(config.run.dir),
        working_dir=Path.cwd(),
        name=config.run.name,
        arguments=(*(item for item in arguments if not item.startswith("run.dir=")), f"run.dir={config.run.dir}"),
        fitting=(*fitting, nodes),
        patience=patience_s(config, restarts),
        cluster=cluster,
        cache=cache_of(cluster),
        local_dir=config.checkpoint.local_dir,
        files=tuple(files),
    )


def patience_s(config: Config, restarts: int) -> int:
    """Return the seconds after the first task's end until srun kills the other tasks; 0: never."""
    if config.cluster.spares:
        return 0  # the tasks of a lost node end long before the others
    if restarts:
        return TOGETHER_S  # supervisors end together
    return math.ceil(config.run.timeout) + 60


def submit(config: Config, job: SlurmJob, chain: int, after: Sequence[FollowUp] = ()) -> int:
    """Write the run's folder and queue `chain` jobs, then follow-up jobs. Returns the exit code.

    Nothing is written or queued if earlier jobs of this folder are queued or running, or if SLURM does not answer.
    """
    notes = notes_of(job.run_dir)
    jobs: list[str] = []
    later: list[str] = []
    try:
        obstacle = under_way(job.run_dir, "run")
    except SlurmError as error:  # submission.json is not overwritten, since the jobs that it lists may still run
        obstacle = (
            f"{error}; nothing is submitted, because earlier jobs of {job.run_dir} may still run: try again later"
        )
    if obstacle is not None:
        print(obstacle, file=sys.stderr)
        return 1
    try:
        write_run_folder(config, job)
        for _ in range(chain):
            jobs.append(scheduler.submit(job.script_path, jobs[-1] if jobs else None))
            write_notes(notes, job, jobs, later, None)
        for follow_up in after:
            follow_up.script_path.write_text(then.script(follow_up))
            later.append(scheduler.submit(follow_up.script_path, [*jobs, *later][-1], only_after_success=True))
            write_notes(notes, job, jobs, later, None)
    except SlurmError as error:
        print(error, file=sys.stderr)
        if jobs:
            print(f"jobs submitted before this error are still queued: {' '.join([*jobs, *later])}", file=sys.stderr)
        write_notes(notes, job, jobs, later, str(error))
        return 1
    print(f"submitted as job {', '.join(jobs)}; its log: {job.run_dir}/logs/slurm-{jobs[0]}.txt\n"
          f"for the run's state: hybridtron status {job.run_dir}")  # fmt: skip
    for number, before, follow_up in zip(later, [jobs[-1], *later], after, strict=False):
        print(f"job {number}, if job {before} succeeds: {follow_up.command}")
    return 0


def notes_of(folder: Path) -> Path:
    """Return the path of slurm/submission.json, which records the last submission of this run or sweep folder."""
    return folder / "slurm" / "submission.json"


def under_way(folder: Path, what: str) -> str | None:
    """Return a message if submitted jobs of this folder have not ended, else None.

    `what` names the kind of folder in the message: run or sweep. Raises SlurmError if SLURM does not answer.
    """
    notes = read_record(notes_of(folder))
    jobs = [entry.job for entry in scheduler.queued([*notes.get("jobs", []), *notes.get("then", [])])]
    if not jobs:
        return None
    return f"the {what} {folder} has unfinished jobs {', '.join(jobs)}: wait, or cancel with scancel {' '.join(jobs)}"


def write_run_folder(config: Config, job: SlurmJob) -> None:
    """Write the code, the configuration and the script into the run's folder."""
    (job.run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    (job.run_dir / "logs").mkdir(exist_ok=True)
    copy_code(job.run_dir / "code", job.files)
    (job.run_dir / "config.yaml").write_text(to_yaml(config))
    job.script_path.write_text(script(job))
    readable = stat.S_IMODE(job.script_path.stat().st_mode)  # permissions that the umask allows
    job.script_path.chmod(readable | (readable & 0o444) >> 2)  # users with read permission may also run it


def copy_code(target: Path, files: Sequence[OutsideFile]) -> None:
    """Copy this package to `target`, so that later edits do not change a job.

    The folder configs/ is copied into the package, as in an installed package. The user's own configuration files are
    added to this copy: the files in ./configs, and `files`, which the command line names by path. pyproject.toml is
    copied if it exists.
    """
    temporary = target.with_name(".code.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(PACKAGE, temporary / PACKAGE.name, ignore=ignored)
    shutil.copytree(shipped("configs"), temporary / PACKAGE.name / "configs", dirs_exist_ok=True)
    copy_into(temporary / PACKAGE.name / "configs", own_folder(shipped("configs")), files)
    if PROJECT.is_file():
        shutil.copy2(PROJECT, temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def write_notes(notes: Path, job: SlurmJob, jobs: list[str], later: list[str], error: str | None) -> None:
    """Write slurm/submission.json: job numbers, SLURM's error or null, time, nodes, arguments, and git's state.

    later: numbers of the follow-up jobs
    """
    notes.parent.mkdir(parents=True, exist_ok=True)
    submission = {
        "jobs": jobs,
        "then": later,
        "error": error,
        "submitted": time.strftime("%F %T"),
        "nodes": job.fitting[-1],
        "arguments": job.arguments,
        "commit": git_output("rev-parse", "HEAD"),
        "changed": git_output("status", "--short"),
    }
    notes.write_text(json.dumps(submission, indent=2))


def _clusters() -> str:
    return ", ".join(choices_of("cluster"))
