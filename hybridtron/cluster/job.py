"""A job as a script for sbatch, which a person can read, edit and submit again.

The script is bash where SLURM itself has to be asked (host names, requeueing); decisions are made by `attempt.py`,
inside the container where there is one. Every value is quoted for the shell; #SBATCH lines, which no shell reads, may
hold only plain characters (`unusable` lists others). Python runs with -P, so that the package of the run's own code/
is imported and not one in the working folder, which `-m` would prefer.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hybridtron.config.cluster import ClusterConfig, Runtime

PLAIN = re.compile(r"[\w.,:@/+=\[\]-]+", re.ASCII)

FORWARD_SIGNALS = """\
# Runs a command and exits as it does. Every signal is forwarded as SIGUSR1, which srun passes to all tasks; at SIGTERM
# it would kill them. `wait` ends early when a signal comes, so it is called again while there is a job.
stopped='' job=''
trap 'stopped=yes; [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null' TERM INT USR1
forwarding() {
  local code
  "$@" & job=$!
  [ -z "$stopped" ] || kill -USR1 "$job"
  while kill -0 "$job" 2>/dev/null; do wait "$job"; done
  wait "$job"; code=$?
  job=''
  return "$code"
}
"""

HEAD = """\
# {title}
# Written by hybridtron submit. It may be edited, and submitted again with: sbatch {script}
# shellcheck disable=SC2016  # settings are quoted, so that the shell leaves them as they are
run={run}
export PYTHONPATH=$run/code${{PYTHONPATH:+:$PYTHONPATH}}
python={python}
per_node={processes}
logs=$run/logs/slurm-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$logs"
{software}set -uo pipefail  # after the software, whose scripts may not bear it
"""

NODES = """\
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

use_nodes() {  # NODE,NODE,...: rank 0 runs on the first of them, where the others connect to it
  nodes=$1
  MASTER_ADDR=$(scontrol show node "${nodes%%,*}" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
  export MASTER_ADDR
}
"""

DECIDING = """\
# What the run's history says: a word, the nodes that it is about, and nodes that were found to be bad just now; a dash
# stands for none. The reasons go to this job's log.
ask() {
  read -r word named bad < <(inside "$python" -P -m hybridtron.cluster.attempt "$@" --run "$run" \\
    --job "$SLURM_JOB_ID" --restart "${SLURM_RESTART_COUNT:-0}" | tail -n 1)
  [ "${named:--}" != - ] || named=''
  [ "${bad:--}" != - ] || bad=''
}
"""

REQUEUE = """\
again() {  # [NODE,...]: requeue this job, without these nodes
  # what SLURM has ended already (cancelled, or requeued by somebody else) is left to it
  [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" = RUNNING ] || exit 1
  trap '' TERM  # requeueing ends this script too, and nodes can be excluded only after it
  scontrol requeue "$SLURM_JOB_ID" || exit 1
  [ -z "$1" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$1"
  exit 1
}
"""

NO_REQUEUE = """\
again() {  # [NODE,...]: this cluster's jobs don't requeue themselves
  echo "the run is not at its end, and cluster.requeue=false: the chain's next job resumes it, or submit it again" >&2
  exit 1
}
"""

BEGIN = """\
# Is there anything to do?
ask begin --nodes "$nodes"
case $word in
  go) ;;
  done) exit 0 ;;
  *) exit 1 ;;
esac
"""

CHECK = """\
# Is every node fit to train on?
use_nodes "$nodes"
forwarding everywhere "$logs/check-%t.txt" hybridtron.cluster.preflight --reports "$logs" \\
  {options}
code_of_check=$?
if [ -z "$stopped" ]; then
  ask check --nodes "$nodes" --reports "$logs" --code "$code_of_check" --fitting {fitting}
{drain}  case $word in
    go) use_nodes "$named" ;;
    again) again "$named" ;;
    *) exit 1 ;;
  esac
fi
"""

TRAIN = """\
# The run itself, and what comes after it
code_of_run=75  # stopped before it began
if [ -z "$stopped" ]; then
  forwarding everywhere "$logs/rank-%t.txt" hybridtron train \\
    {arguments}
  code_of_run=$?
fi

ask end --code "$code_of_run" ${{stopped:+--stopped}}
case $word in
  done) exit 0 ;;
  again) again "$named" ;;
  *) exit 1 ;;
esac
"""

DRAIN = """\
  [ -z "$bad" ] || scontrol update NodeName="$bad" State=DRAIN Reason="failed the check of job $SLURM_JOB_ID"
"""


@dataclass(frozen=True)
class SlurmJob:
    """What one job does: which command, where, on how many nodes."""

    run_dir: Path
    working_dir: Path
    name: str
    arguments: tuple[str, ...]
    fitting: tuple[int, ...]  # numbers of nodes that the layout can be shared out over and that will do, in order
    patience: int  # seconds that the other ranks get to end when one has ended
    cluster: ClusterConfig

    @property
    def script_path(self) -> Path:
        return self.run_dir / "slurm" / "job.sh"


def directives(job: SlurmJob) -> dict[str, str]:
    """The #SBATCH options, by the key that each comes from."""
    cluster, fitting = job.cluster, job.fitting
    elastic = len(fitting) > 1
    nodes = f"{fitting[0]}-{fitting[-1]}" if elastic else str(fitting[-1])
    chosen = {
        "run.name": "--job-name=" + re.sub(r"[^\w.-]+", "-", job.name, flags=re.ASCII),
        "nodes": f"--nodes={nodes}",
        # with a number of tasks SLURM would give the least number of nodes, and not as many as there are
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
    """Values that can't stand in an #SBATCH line, by their keys."""
    given = {key: option.removesuffix("%j.txt") for key, option in directives(job).items()}
    return {key: option for key, option in given.items() if not PLAIN.fullmatch(option)}


def script(job: SlurmJob) -> str:
    """The job as text."""
    assert not unusable(job)
    cluster = job.cluster
    sizes = " or ".join(map(str, job.fitting))
    head = HEAD.format(
        title=f"{job.name.splitlines()[0]}: {sizes} nodes of {cluster.processes} processes",
        script=shlex.quote(str(job.script_path)),
        run=shlex.quote(str(job.run_dir)),
        python=shlex.quote(cluster.python),
        processes=cluster.processes,
        software="".join(f"{line}\n" for line in _software(cluster)),
    )
    check = CHECK.format(
        options=_joined(_check_options(job)),
        fitting=",".join(map(str, job.fitting)),
        drain=DRAIN if cluster.checks.drain else "",
    )
    parts = [
        head,
        FORWARD_SIGNALS,
        NODES,
        _processes(job),
        DECIDING,
        REQUEUE if cluster.requeue else NO_REQUEUE,
        BEGIN,
        check,
        TRAIN.format(arguments=" \\\n    ".join(map(shlex.quote, job.arguments))),
    ]
    options = "".join(f"#SBATCH {option}\n" for option in directives(job).values())
    return f"#!/bin/bash\n{options}" + "\n".join(parts)


def _option(name: str, value: object) -> str | None:
    return None if value is None else f"{name}={value}"


def _software(cluster: ClusterConfig) -> list[str]:
    """The lines that make the software and its variables available."""
    lines = [f"module load {_joined(cluster.modules)}"] if cluster.modules else []
    if cluster.venv:
        lines += ["# shellcheck disable=SC1091", f"source {shlex.quote(f'{cluster.venv}/bin/activate')}"]
    return lines + [f"export {name}={_text(value)}" for name, value in cluster.environment.items()]


def _processes(job: SlurmJob) -> str:
    """The shell functions that start one process here, and one for each GPU of the chosen nodes."""
    cluster, container = job.cluster, job.cluster.container
    step = [
        "--nodelist=$nodes", "--nodes=$count", "--ntasks=$((count * per_node))", "--ntasks-per-node=$per_node",
        "--distribution=block", "--kill-on-bad-exit=0", f"--wait={job.patience}", "--output=$output",
    ]  # fmt: skip
    if cluster.cpus_per_process:
        step.append(f"--cpus-per-task={cluster.cpus_per_process}")
    inside, wrapped = "", ""
    mounts = [f"{job.run_dir}:{job.run_dir}", f"{job.working_dir}:{job.working_dir}", *container.mounts]
    if container.image and container.runtime is Runtime.pyxis:
        options = _joined([
            f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={job.working_dir}",
        ])  # fmt: skip
        inside = f"srun --overlap --nodes=1 --ntasks=1 {options} "
        step.append(options)
    elif container.image:
        gpus = ["--nv"] if cluster.gpus_per_node else []
        given = ["exec", *gpus, "--bind", ",".join(mounts), "--pwd", str(job.working_dir), container.image]
        inside = wrapped = f"apptainer {_joined(given)} "
    options = " \\\n    ".join(_step_option(option) for option in step)
    return (
        f'inside() {{ {inside}"$@"; }}  # one process on this node\n\n'
        "# shellcheck disable=SC2329  # `forwarding` calls it\n"
        "everywhere() {  # LOG MODULE ...: one process for each GPU (or CPU process) of the chosen nodes\n"
        "  local output=$1 count; shift\n"
        "  count=$(tr ',' '\\n' <<<\"$nodes\" | wc -l)\n"
        f"  exec srun {options} \\\n    {wrapped}\"$python\" -P -m \"$@\"\n"
        "}\n"
    )  # fmt: skip


def _step_option(option: str) -> str:
    """Options with the script's own variables are quoted here, all others are already."""
    return f'"{option}"' if "$" in option and not option.startswith("--container") else option


def _check_options(job: SlurmJob) -> list[str]:
    checks = job.cluster.checks
    given = {
        "--gpus": job.cluster.gpus_per_node,
        "--disk-gb": f"{checks.disk_gb:g}",
        "--shared-gb": f"{checks.shared_gb:g}",
        "--clock-s": f"{checks.clock_s:g}",
        "--timeout": checks.timeout,
        "--node-gb-per-s": checks.node_gb_per_s,
        "--network-gb-per-s": checks.network_gb_per_s,
        "--fabric": ",".join(checks.fabric) or None,
    }
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    return options if checks.all_reduce else [*options, "--no-all-reduce"]


def _text(value: str) -> str:
    """In quotes, also where the shell would need none: `=mlx5_0` looks like a mistake."""
    quoted = shlex.quote(value)
    return quoted if quoted != value else f"'{value}'"


def _joined(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(shlex.quote(word) for word in words)
