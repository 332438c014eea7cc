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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridtron.compiled import user_cache
from hybridtron.config.cluster import ClusterConfig, Runtime
from hybridtron.config.outside import OutsideFile

PLAIN = re.compile(r"[\w.,:@/+=\[\]-]+", re.ASCII)
SCRIPTS = Path(__file__).parent
CONTAINER = '"${container[@]}"'  # stands for the options of the container in a list of words
WHOLE_NODE = "--exclusive"


@dataclass(frozen=True)
class SlurmJob:
    """A job that trains a run.

    run_dir, working_dir: the run's folder, and the folder in which the commands run
    name: the run's name
    arguments: arguments for `hybridtron train`
    fitting: node counts with which the layout can run, the smallest first
    patience: seconds after the first rank's end until srun kills the other ranks; 0: never
    cluster: the section `cluster` in the configuration
    cache: folder for compiled kernels, which all attempts share
    local_dir: folder on each node for local checkpoints (`checkpoint.local_dir`), or None
    files: the user's own configuration files, which are copied into RUN/code
    """

    run_dir: Path
    working_dir: Path
    name: str
    arguments: tuple[str, ...]
    fitting: tuple[int, ...]
    patience: int
    cluster: ClusterConfig
    cache: Path
    local_dir: str | None = None
    files: tuple[OutsideFile, ...] = ()

    @property
    def script_path(self) -> Path:
        return self.run_dir / "slurm" / "job.sh"


def directives(job: SlurmJob) -> dict[str, str]:
    """Return the #SBATCH options of a job, each under the configuration key that sets it."""
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
        "cluster.gpus_per_node": _gpus(cluster),
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
        f"stage={shlex.quote(cluster.stage or '')}  # folder on each node for copies of the data",
        f"local_dir={shlex.quote(job.local_dir or '')}  # folder on each node for local checkpoints",
        *container_lines(job),
        *unpacked_lines(job),
        *(f"{name}=({joined(words)})" for name, words in commands(job).items()),
        "settings=(",
        *(f"  {shlex.quote(argument)}" for argument in job.arguments),
        ")",
        *software(job),
        steps("job.sh"),
    ]
    return "\n".join(lines)


def opening(job: SlurmJob, options: Mapping[str, str], comments: Sequence[str]) -> list[str]:
    """Return the first lines of a script for single processes: #SBATCH lines, comments, and the package's path."""
    return [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options.values()),
        *comments,
        "# shellcheck disable=SC2016,SC2034,SC2054  # settings are quoted, so $ and commas have no special meaning",
        f"code={shlex.quote(str(job.run_dir / 'code'))}",
        "export PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH}",
    ]


def _option(name: str, value: object) -> str | None:
    if value is None:
        return None
    return f"{name}={value}"


def _gpus(cluster: ClusterConfig) -> str | None:
    """Return sbatch's option for the GPUs of a node; None for nodes without GPUs."""
    if not cluster.gpus_per_node:
        return None
    if cluster.gres is None:
        return f"--gpus-per-node={cluster.gpus_per_node}"
    return f"--gres={cluster.gres}:{cluster.gpus_per_node}"


def steps(name: str) -> str:
    """Return the text of a bash file in this folder, with `forwarding.sh` in place of the comment `# forwarding.sh`."""
    text, forwarding = ((SCRIPTS / file).read_text() for file in (name, "forwarding.sh"))
    return text.replace("# forwarding.sh\n", forwarding)


def software(job: SlurmJob) -> list[str]:
    """Return the script's lines that load modules, activate the virtual environment and export variables."""
    cluster = job.cluster
    if cluster.modules:
        lines = [f"module load {shlex.join(cluster.modules)}"]
    else:
        lines = []
    if cluster.venv:
        lines += ["# shellcheck disable=SC1091", f"source {shlex.quote(f'{cluster.venv}/bin/activate')}"]
    for name, value in exports(job).items():
        unless_set = "" if name in cluster.environment or cluster.cache else f'[ -n "${{{name}:-}}" ] || '
        lines.append(f"{unless_set}export {name}={_text(value)}")
    return lines


def cache_of(cluster: ClusterConfig) -> Path:
    """Return the folder for compiled kernels: `cluster.cache`, or the user's cache folder."""
    if cluster.cache is None:
        return user_cache().absolute()
    return Path(cluster.cache)


def exports(job: SlurmJob) -> dict[str, str]:
    """Return the environment variables that the script exports; `cluster.environment` overrides the caches.

    Without `cluster.cache`, `software` keeps the values of cache variables that the job inherits.
    """
    caches = {
        "XDG_CACHE_HOME": str(job.cache),
        "TRITON_CACHE_DIR": f"{job.cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{job.cache}/torchinductor",
    }
    return caches | job.cluster.environment


def one_process(cluster: ClusterConfig) -> ClusterConfig:
    """Return the settings for a job with a single process, with one GPU if nodes have GPUs.

    The option that would reserve a full node is left out.
    """
    return replace(
        cluster,
        gpus_per_node=min(1, cluster.gpus_per_node),
        processes_per_node=1,
        sbatch=[option for option in cluster.sbatch if option != WHOLE_NODE],
        spares=0,
    )


def commands(job: SlurmJob) -> dict[str, list[str]]:
    """Return three lists of command-line words.

    alone    command that runs a Python module as one process on the script's node
    task     command that runs a Python module in each task of an srun
    step     options for srun

    The word `CONTAINER` stands for the container's options. `container_lines` defines these options in the script.
    """
    cluster = job.cluster
    container = cluster.container
    python = [cluster.python, "-P", "-m"]
    step = [f"--wait={job.patience}"]
    if cluster.cpus_per_process:
        step.append(f"--cpus-per-task={cluster.cpus_per_process}")
    if cluster.spares:
        step.append("--no-kill")
    if not container.image:
        return {"alone": python, "task": python, "step": step}
    if container.runtime is Runtime.pyxis:
        alone = ["srun", "--overlap", "--nodes=1", "--ntasks=1", CONTAINER, *python]
        return {"alone": alone, "task": python, "step": [*step, CONTAINER]}
    wrapped = ["apptainer", "exec", CONTAINER, *python]
    return {"alone": wrapped, "task": wrapped, "step": step}


def container_lines(job: SlurmJob) -> list[str]:
    """Return the script's lines that define the container's options, and create the folder for the cache.

    In Pyxis an image's environment variables override those of the job, except the variables in --container-env.
    """
    cluster = job.cluster
    container = cluster.container
    if not container.image:
        return []
    if container.runtime is Runtime.pyxis:
        options = [
            f"--container-image={container.image}",
            f"--container-mounts={mounts(job)}",
            f"--container-workdir={job.working_dir}",
            f"--container-env={','.join(['PYTHONPATH', *exports(job)])}",
        ]
    else:
        gpus = ["--nv"] if cluster.gpus_per_node else []
        options = [*gpus, "--bind", mounts(job), "--pwd", str(job.working_dir), container.image]
    cache = f"mkdir -p {shlex.quote(str(job.cache))}  # the container mounts this folder"
    return [cache, f"container=({shlex.join(options)})"]


def unpacked_lines(job: SlurmJob) -> list[str]:
    """Return the script's lines that name the unpacked container; the name is empty if nothing is unpacked.

    Without a name, Pyxis would unpack the image again at every step. A container with a name is unpacked once on each
    node, and remains there after the step. The name contains the job's number, which a requeued job keeps. So a later
    job does not use a container of an older image.
    """
    container = job.cluster.container
    if not container.image or container.runtime is not Runtime.pyxis:
        return ["unpacked=''  # no container that stays on the nodes"]
    return [
        "unpacked=hybridtron-$SLURM_JOB_ID  # the container that each node unpacks once, for all steps and attempts",
        'container+=(--container-name="$unpacked")',
    ]


def mounts(job: SlurmJob) -> str:
    """Return the container's mounts: the job's own folders, and `cluster.container.mounts`."""
    folders = dict.fromkeys([job.run_dir, job.working_dir, job.cache])
    for folder in (job.cluster.stage, job.local_dir):
        if folder is not None:
            folders[Path(folder)] = None
    return ",".join([*(f"{path}:{path}" for path in folders), *job.cluster.container.mounts])


def joined(words: Sequence[str]) -> str:
    """Join words as `shlex.join` does, but leave the word `CONTAINER` unquoted."""
    return " ".join(word if word == CONTAINER else shlex.quote(word) for word in words)


def _text(value: str) -> str:
    """Quote a value for the shell, even if it needs no quotes: `NAME==mlx5_0` without quotes looks like a mistake."""
    quoted = shlex.quote(value)
    if quoted != value:
        return quoted
    return f"'{value}'"
