"""SLURM's own programs, as far as submitting and watching need them; nothing else calls them from Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60  # seconds that a busy controller may take to answer
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


class SlurmError(RuntimeError):
    """A program of SLURM's failed; the text is its own message."""


@dataclass(frozen=True)
class Partition:
    """A partition's limits; None: no limit on the time."""

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
    """Why SLURM can't be asked here, or None."""
    if not is_here():
        return "sbatch is not on the PATH here; submit where it is"
    try:
        partitions()
    except SlurmError as error:
        return str(error)
    return None


def partitions() -> list[Partition]:
    lines = _output(["sinfo", "--noheader", "--format=%P|%a|%l|%D"]).splitlines()
    return [_partition(*line.split("|")) for line in lines if line.count("|") == 3]


def would_start(script: Path) -> None:
    """Let SLURM itself say whether a script could ever be scheduled. Raises SlurmError with its reason."""
    _output(["sbatch", "--test-only", str(script)])


def submit(script: Path, after: str | None) -> str:
    """Queue a script, to begin when the job `after` has ended, however it did; the number of the new job."""
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    return _output(["sbatch", "--parsable", *dependency, str(script)]).strip().partition(";")[0]


def queued(jobs: Sequence[str]) -> list[Queued]:
    """Those of these jobs that are still queued or running; elements of an array count as their job."""
    if not jobs:
        return []
    # asked for all jobs: squeue fails where it knows none of those that are named
    lines = _output(["squeue", "--noheader", "--format=%i|%T|%r|%N|%S"]).splitlines()
    found = [Queued(*line.split("|", 4)) for line in lines if line.count("|") >= 4]
    return [one for one in found if one.job.partition("_")[0] in jobs]


def seconds(time: str) -> int | None:
    """`1-12:00:00`, `12:00:00`, `90:00` or `90` (minutes) in seconds; None for what is no time limit of SLURM's."""
    matched = _TIME.fullmatch(time)
    if matched is None:
        return None
    days, first, second, third = (int(text or 0) for text in matched.groups())
    from_hours = matched["days"] is not None or matched["c"] is not None  # else minutes:seconds
    hours, minutes, rest = (first, second, third) if from_hours else (0, first, second)
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
