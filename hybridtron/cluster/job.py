"""A SLURM job as an sbatch script that a user can read, edit and submit again.

The script starts with the job's own values: #SBATCH lines and shell variables. Then follows the text of `job.sh`, which
all jobs share. It has bash code for host names, requeueing and other parts that need SLURM, and calls `attempt.py` for
decisions, inside the container if there is one.

Values of shell variables are quoted. #SBATCH lines are read by SLURM and not by a shell, so their values can't be
quoted and may contain only the characters in `PLAIN`. Python runs with -P, so that it imports the package from the copy
RUN/code. Without -P, `python -m` would prefer a package in the working folder.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hybridtron.config.cluster import ClusterConfig, Runtime
from hybridtron.config.outside import OutsideFile

PLAIN = re.compile(r"[\w.,:@/+=\[\]-]+", re.ASCII)
SCRIPTS = Path(__file__).parent


@dataclass(frozen=True)
class SlurmJob:
    """A job that trains a run.

    run_dir, working_dir: the run's folder, and the folder in which the commands run
    name: the run's name
    arguments: arguments for `hybridtron train`
    fitting: node counts with which the layout can run, the smallest first
    patience: seconds after the first rank's end until srun kills the other ranks; 0: never
    cluster: the section `cluster` in the configuration
    files: the user's own configuration files, which are copied into RUN/code
    """

    run_dir: Path
    working_dir: Path
    name: str
    arguments: tuple[str, ...]
    fitting: tuple[int, ...]
    patience: int
    cluster: ClusterConfig
    files: tuple[OutsideFile, ...] = ()

    @property
    def script_path(self) -> Path:
        return self.run_dir / "slurm" / "job.sh"


def directives(job: SlurmJob) -> dict[str, str]:
    """Return a mapping from a configuration key to the #SBATCH option that has the key's value."""
    cluster = job.cluster
    fitting = job.fitting
    elastic = len(fitting) > 1
    if elastic:
        nodes = f"{fitting[0]}-{fitting[-1] + cluster.spares}"
    else:
        nodes = str(fitting[-1] + cluster.spares)
    chosen = {
        "run.name": "--job-name=" + re.sub(r"[^\w.-]+", "-", job.name, flags=re.ASCII),
        "nodes": f"--nodes={nodes}",
        # if a number of tasks is set, SLURM allocates the fewest nodes of the range, although more are free
        "cluster.processes_per_node": "--exclusive" if elastic else f"--ntasks-per-node={cluster.processes}",
        "cluster.gpus_per_node": f"--gpus-per-node={cluster.gpus_per_node}" if cluster.gpus_per_node else None,
        "cluster.cpus_per_process": None if elastic else _option("--cpus-per-task", cluster.cpus_per_process),
        "cluster.memory": _option("--mem", cluster.memory),
        "cluster.partition": _option("--partition", cluster.partition),
        "cluster.account": _option("--account", cluster.account),
        "cluster.qos": _option("--qos", cluster.qos),
        "cluster.time": f"--time={cluster.time}",
        "cluster.stop_before": f"--signal=B:USR1@{cluster.stop_before}",
        "cluster.requeue": "--requeue" if cluster.requeue else "--no-requeue",
        "cluster.spares": "--no-kill" if cluster.spares else None,  # a lost node must not end the job
        "open": "--open-mode=append",
        "run.dir": f"--output={job.run_dir}/logs/slurm-%j.txt",
        "the working folder": f"--chdir={job.working_dir}",
    }
    further = {
        f"cluster.sbatch.{index}": option
        for index, option in enumerate(cluster.sbatch)
        if option not in chosen.values()
    }
    return {key: option for key, option in (chosen | further).items() if option is not None}


def unusable(job: SlurmJob) -> dict[str, str]:
    """Return the #SBATCH options with characters outside `PLAIN`, by configuration key."""
    options = {key: option.removesuffix("%j.txt") for key, option in directives(job).items()}
    return {key: option for key, option in options.items() if not PLAIN.fullmatch(option)}


def script(job: SlurmJob) -> str:
    """Return the job's script: #SBATCH lines, shell variables with the job's values, and the text of `job.sh`."""
    assert not unusable(job)
    cluster = job.cluster
    fitting = job.fitting
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in directives(job).values()),
        f"# {job.name.splitlines()[0]}: {' or '.join(map(str, fitting))} nodes of {cluster.processes} processes",
        f"# Written by hybridtron submit. Users may edit this script and submit it with: sbatch {job.script_path}",
        "# shellcheck disable=SC2016,SC2054  # settings are quoted, so $ and commas have no special meaning",
        f"run={shlex.quote(str(job.run_dir))}",
        f"per_node={cluster.processes}",
        f"fitting={','.join(map(str, fitting))}  # numbers of nodes that fit the layout",
        f"spares={cluster.spares}  # nodes in addition, which take the place of lost nodes",
        f"requeue={str(cluster.requeue).lower()}",
        f"drain={str(cluster.checks.drain).lower()}",
        *(f"{name}=({shlex.join(words)})" for name, words in commands(job).items()),
        "settings=(",
        *(f"  {shlex.quote(argument)}" for argument in job.arguments),
        ")",
        *software(cluster),
        steps("job.sh"),
    ]
    return "\n".join(lines)


def _option(name: str, value: object) -> str | None:
    if value is None:
        return None
    return f"{name}={value}"


def steps(name: str) -> str:
    """Return the text of a bash file in this folder, with `forwarding.sh` in place of the comment `# forwarding.sh`."""
    text, forwarding = ((SCRIPTS / file).read_text() for file in (name, "forwarding.sh"))
    return text.replace("# forwarding.sh\n", forwarding)


def software(cluster: ClusterConfig) -> list[str]:
    """Return the script's lines that load modules, activate the virtual environment and export variables."""
    if cluster.modules:
        lines = [f"module load {shlex.join(cluster.modules)}"]
    else:
        lines = []
    if cluster.venv:
        lines += ["# shellcheck disable=SC1091", f"source {shlex.quote(f'{cluster.venv}/bin/activate')}"]
    return lines + [f"export {name}={_text(value)}" for name, value in cluster.environment.items()]


def commands(job: SlurmJob) -> dict[str, list[str]]:
    """Return three lists of command-line words, which include the container's options.

    alone    command that runs a Python module as one process on the script's node
    task     command that runs a Python module in each task of an srun
    step     options for srun
    """
    cluster = job.cluster
    container = job.cluster.container
    python = [cluster.python, "-P", "-m"]
    step = [f"--wait={job.patience}"]
    if cluster.cpus_per_process:
        step.append(f"--cpus-per-task={cluster.cpus_per_process}")
    if cluster.spares:
        step.append("--no-kill")
    mounts = ",".join([f"{job.run_dir}:{job.run_dir}", f"{job.working_dir}:{job.working_dir}", *container.mounts])
    if not container.image:
        return {"alone": python, "task": python, "step": step}
    if container.runtime is Runtime.pyxis:
        pyxis_options = [f"--container-image={container.image}", f"--container-mounts={mounts}"]
        pyxis_options.append(f"--container-workdir={job.working_dir}")
        alone = ["srun", "--overlap", "--nodes=1", "--ntasks=1", *pyxis_options, *python]
        return {"alone": alone, "task": python, "step": [*step, *pyxis_options]}
    gpus = ["--nv"] if cluster.gpus_per_node else []
    container_options = [*gpus, "--bind", mounts, "--pwd", str(job.working_dir), container.image]
    wrapped = ["apptainer", "exec", *container_options, *python]
    return {"alone": wrapped, "task": wrapped, "step": step}


def _text(value: str) -> str:
    """Quote a value for the shell, even if it needs no quotes: `NAME==mlx5_0` without quotes looks like a mistake."""
    quoted = shlex.quote(value)
    if quoted != value:
        return quoted
    return f"'{value}'"
