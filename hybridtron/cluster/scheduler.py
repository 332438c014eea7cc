"""Calls of SLURM's own programs for submitting and watching jobs. No other Python code calls these programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60  # seconds; a busy controller may take long to answer
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


class SlurmError(RuntimeError):
    """Raised when one of SLURM's programs fails; the text is its own message."""


@dataclass(frozen=True)
class Partition:
    """A partition's state and limits. `time_s` is None if it has no time limit."""

    name: str
    is_default: bool
    is_up: bool
    time_s: int | None
    nodes: int


@dataclass(frozen=True)
class Queued:
    """A job as squeue shows it."""

    job: str
    state: str
    reason: str
    nodes: str
    start: str


def is_here() -> bool:
    return shutil.which("sbatch") is not None


def silence() -> str | None:
    """Describe why SLURM can't be asked on this machine, or return None."""
    if not is_here():
        return "sbatch is not on the PATH here; submit where it is"
    try:
        partitions()
    except SlurmError as error:
        return str(error)
    return None


def partitions() -> list[Partition]:
    """List all partitions. Raises SlurmError."""
    lines = _output(["sinfo", "--noheader", "--format=%P|%a|%l|%D"]).splitlines()
    return [_partition(*line.split("|")) for line in lines if line.count("|") == 3]


def would_start(script: Path) -> None:
    """Let SLURM check whether a script could ever be scheduled. Raises SlurmError with its reason."""
    _output(["sbatch", "--test-only", str(script)])


def submit(script: Path, after: str | None) -> str:
    """Queue a script and return the new job's number.

    It starts after the job `after` has ended, whether that succeeded or failed; at once if `after` is None.
    """
    if after is None:
        dependency = []
    else:
        dependency = [f"--dependency=afterany:{after}"]
    return _output(["sbatch", "--parsable", *dependency, str(script)]).strip().partition(";")[0]


def queued(jobs: Sequence[str]) -> list[Queued]:
    """Return those jobs that are still queued or running. Elements of an array count as their job."""
    if not jobs:
        return []
    # all jobs are listed, because squeue fails if it knows none of the jobs named on its command line
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
    from_hours = matched["days"] is not None or matched["c"] is not None  # otherwise the first number is minutes
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
