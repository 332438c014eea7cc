"""Calls of SLURM's programs: sbatch submits jobs, squeue lists jobs, sinfo lists partitions.

No other Python code calls these programs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.problems import Code

PATIENCE = 60  # time limit of a call in seconds; SLURM's controller may be busy
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


class SlurmError(RuntimeError):
    """Raised if a SLURM program fails, is missing, or does not answer. The text contains the program's message."""

    code: Code = "unavailable"


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster. `nodes` is its number of nodes. `time_s` is its time limit in seconds, or None."""

    name: str
    is_default: bool
    is_up: bool
    time_s: int | None
    nodes: int


@dataclass(frozen=True)
class Queued:
    """A job in the queue, with the fields of squeue.

    job: the job's number; JOB_INDEX for an element of an array
    state, reason: SLURM's state such as PENDING, and the reason why the job waits
    nodes: the nodes on which the job runs
    start: the actual or expected start time
    """

    job: str
    state: str
    reason: str
    nodes: str
    start: str


def is_here() -> bool:
    return shutil.which("sbatch") is not None


def silence() -> str | None:
    """Return the reason why SLURM does not answer on this machine, or None if it answers."""
    if not is_here():
        return "sbatch is not on this machine's PATH: submit on a machine that has sbatch"
    try:
        partitions()
    except SlurmError as error:
        return str(error)
    return None


def partitions() -> list[Partition]:
    """Return all partitions. Raises SlurmError if SLURM does not answer."""
    lines = _output(["sinfo", "--noheader", "--format=%P|%a|%l|%D"]).splitlines()
    return [_partition(*line.split("|")) for line in lines if line.count("|") == 3]


def would_start(script: Path) -> None:
    """Let SLURM check a script without queueing it. Raises SlurmError with the reason if the job could never start."""
    _output(["sbatch", "--test-only", str(script)])


def submit(script: Path, after: str | None, only_after_success: bool = False) -> str:
    """Queue a script and return the new job's number.

    The new job starts after the job with number `after` has ended, successfully or not. With `only_after_success`,
    SLURM cancels the new job if job `after` fails; a requeued job has neither ended nor failed. If `after` is None, the
    new job starts as soon as resources are free.
    """
    if after is None:
        dependency = []
    elif only_after_success:
        dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    else:
        dependency = [f"--dependency=afterany:{after}"]
    return _output(["sbatch", "--parsable", *dependency, str(script)]).strip().partition(";")[0]


def queued(jobs: Sequence[str]) -> list[Queued]:
    """Return the queue entries of jobs with these numbers. Jobs that have ended have no entry.

    An array job can have several entries, one for each element.
    """
    if not jobs:
        return []
    # list all jobs of the cluster: `squeue --jobs` fails if SLURM knows none of the listed jobs
    lines = _output(["squeue", "--noheader", "--format=%i|%T|%r|%N|%S"]).splitlines()
    entries = [Queued(*line.split("|", 4)) for line in lines if line.count("|") >= 4]
    return [entry for entry in entries if entry.job.partition("_")[0] in jobs]


def seconds(time: str) -> int | None:
    """Convert a time limit such as `1-12:00:00`, `12:00:00`, `90:00` or `90` (minutes) to seconds.

    Returns None for a text that is not a time limit, such as `infinite`.
    """
    matched = _TIME.fullmatch(time)
    if matched is None:
        return None
    days, first, second, third = (int(text or 0) for text in matched.groups())
    from_hours = matched["days"] is not None or matched["c"] is not None  # else the first number is minutes
    if from_hours:
        hours = first
        minutes = second
        rest = third
    else:
        hours = 0
        minutes = first
        rest = second
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _partition(name: str, state: str, limit: str, nodes: str) -> Partition:
    return Partition(name.rstrip("*"), name.endswith("*"), state == "up", seconds(limit), int(nodes))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine's PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} does not answer within {PATIENCE} s") from None
    if done.returncode:
        raise SlurmError(f"{command[0]} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
