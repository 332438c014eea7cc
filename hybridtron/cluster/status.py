"""The state of runs: hybridtron status [RUN_FOLDER ...]     (without a folder: all below runs/)

Shows state, phase, step, speed, loss, number of starts, and when the run will be done. The values come from the run's
folder, and from SLURM's queue if there is one. The remaining time is estimated from the remaining tokens and the speed
of recent steps; waiting in the queue, evaluations and checkpoints are not included. Nothing is changed, and torch is
not imported. Exit codes: 0 shown, 2 a folder is missing or holds no run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridtron.cluster import history, scheduler
from hybridtron.cluster.history import Attempt
from hybridtron.cluster.scheduler import Queued, SlurmError
from hybridtron.config.load import load_saved
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.limits import path_of
from hybridtron.problems import ConfigError, Unusable
from hybridtron.train.outcome import clock
from hybridtron.train.records import read_lines, read_record

RECENT = 20  # number of steps over which speed is averaged
TAIL = 2**20  # bytes read from the end of metrics.jsonl; a step with many metrics takes a few hundred bytes
WIDTH = 200  # characters per line if the output is not a terminal
STATES = {
    "RUNNING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "SUSPENDED": "suspended",
    "STOPPED": "suspended",
    "CONFIGURING": "starting",
    "COMPLETING": "ending",
    "STAGE_OUT": "ending",
    "PENDING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "held",
    "SPECIAL_EXIT": "held",
    "RESV_DEL_HOLD": "held",
}
"""The run's state for each of SLURM's job states. Of a run's jobs, the one whose state comes first here counts."""

SILENT_S = 1800.0  # a run without SLURM and without an outcome is shown as silent after this time without a step


@dataclass(frozen=True)
class Status:
    """A run's state, from its folder and the queue."""

    folder: Path
    plan: RunPlan
    lines: list[dict[str, Any]]  # metrics of its last steps
    attempts: list[Attempt]
    jobs: list[Queued]
    state: str
    why: str

    @property
    def step(self) -> int:
        """The last step with metrics; 0 before the first."""
        if self.lines:
            return self.lines[-1]["step"]
        return 0

    @property
    def phase(self) -> str:
        """Name and number of the phase that the next step belongs to."""
        phases = self.plan.phases
        if self.step < phases[-1].end_step:
            now = self.plan.phase_continuing_at(self.step)
        else:
            now = phases[-1]
        return now.settings.name + (f" ({now.index + 1} of {len(phases)})" if len(phases) > 1 else "")

    @property
    def tokens_per_second(self) -> float | None:
        """Speed over recent steps of the current phase; None before any step.

        The first of these steps is left out if there are others, because it may include start-up.
        """
        same = [line for line in self.lines if line["phase"] == self.lines[-1]["phase"]]
        counted = same[1:] or same
        seconds = sum(line["step_time"] for line in counted)
        tokens = sum(line["tokens_per_second"] * line["step_time"] for line in counted)
        if seconds > 0:
            return tokens / seconds
        return None

    @property
    def left_s(self) -> float | None:
        """Seconds until the run is done at the current speed; None if the speed is unknown or the run has finished."""
        if (speed := self.tokens_per_second) is None or self.state == "finished":
            return None
        last = self.plan.last_step
        done = min(self.step, last)
        tokens_done = self.plan.phase_ending_at(done).tokens_at(done)
        return (self.plan.phase_ending_at(last).tokens_at(last) - tokens_done) / speed


def main(arguments: list[str]) -> int:
    """Print a table of runs, and for some runs a line with reasons below it. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hybridtron status", description="State, speed and remaining time of runs.")
    parser.add_argument("folders", nargs="*", type=path_of, metavar="RUN_FOLDER", help="default: all below runs/")
    folders: list[Path] = parser.parse_args(arguments).folders
    folders = folders or sorted(path.parent for path in Path("runs").glob("*/config.yaml"))
    if not folders:
        raise Unusable("there is no run below runs/ here: name a run's folder", code="no-file")
    statuses = [status(folder) for folder in folders]
    console = Console()
    show(statuses, console if console.is_terminal else Console(width=WIDTH))
    return 0


def status(folder: Path) -> Status:
    """Read a run's state. Raises Unusable if the folder holds no run."""
    config = _config(folder)
    lines = read_lines(folder / "metrics.jsonl", TAIL)[-RECENT:]
    attempts = history.read(folder)
    submission = read_record(folder / "slurm" / "submission.json")
    jobs, fault = _queued(submission.get("jobs", []))
    state, why = _state(folder, attempts, jobs, submission, lines)
    return Status(folder, RunPlan.of(config), lines, attempts, jobs, state, "; ".join(filter(None, [why, fault])))


def show(found: Sequence[Status], console: Console) -> None:
    """Print the table."""
    table = Table("run", "state", "job", "phase", "step", "tokens/s", "loss", "starts", "left", "done at", box=None)
    for run in found:
        speed = run.tokens_per_second
        left = run.left_s
        loss = run.lines[-1]["loss"] if run.lines else None
        if left is None:
            done_at = ""
        else:
            done_at = time.strftime("%F %H:%M", time.localtime(time.time() + left))
        table.add_row(
            str(run.folder),
            run.state,
            ", ".join(f"{job.job} {job.state.lower()}" for job in run.jobs),
            run.phase if run.lines else "",
            f"{run.step}/{run.plan.last_step}",
            "" if speed is None else readable(speed),
            "" if loss is None else f"{loss:.4f}",
            str(len(run.attempts) or ""),
            "" if left is None else clock(left),
            done_at if run.state == "running" else "",
        )
    console.print(table)
    for run in found:
        if run.why:
            console.print(f"{run.folder}: {run.why}", highlight=False, soft_wrap=True, markup=False)


def _state(
    folder: Path, attempts: list[Attempt], jobs: list[Queued], submission: dict[str, Any], lines: list[dict[str, Any]]
) -> tuple[str, str]:
    """Return the state as one or two words, and an explanation, which may be empty."""
    if jobs:
        return _state_in_queue(jobs, attempts)
    if submission.get("error"):
        return "not submitted", str(submission["error"])
    if attempts and attempts[-1].decision == "stop":
        return "stopped", attempts[-1].why
    outcome = read_record(folder / "outcome.json")
    if outcome:
        if "rank" in outcome:
            where = f"rank {outcome['rank']}: "
        else:
            where = ""
        return str(outcome["outcome"]), f"{where}{outcome['reason']}" if "reason" in outcome else ""
    if not lines:
        return "begun", "no step yet, and no word of an end"
    silent = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    if silent < SILENT_S:
        return ("running", "")
    return ("silent", f"the last step was {clock(silent)} ago")


def _state_in_queue(jobs: list[Queued], attempts: list[Attempt]) -> tuple[str, str]:
    """Return the state and an explanation for a run with jobs that have not ended.

    A job state that is not in `STATES` is shown in SLURM's own words.
    """
    known = list(STATES)
    job = min(jobs, key=lambda job: known.index(job.state) if job.state in known else len(known))
    own_words = job.state.lower().replace("_", " ")
    state = STATES.get(job.state, own_words)
    if state == "running":
        return state, f"on {job.nodes}"
    if state == "held":
        return state, f"job {job.job} waits ({job.reason}) until: scontrol release {job.job}"
    if state != "queued":
        return state, f"job {job.job} is {own_words} on {job.nodes}"
    if attempts and attempts[-1].why:
        before = f"; before that {attempts[-1].outcome}: {attempts[-1].why}"
    else:
        before = ""
    return state, f"job {job.job} waits ({job.reason}), start {job.start}{before}"


def _config(folder: Path) -> Config:
    """Load a run's configuration. Raises Unusable if there is none, or if this version can't read it."""
    if not folder.is_dir():
        raise Unusable(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist", code="no-file")
    if not (folder / "config.yaml").exists():
        raise Unusable(
            f"{folder} has no run: a run's folder has config.yaml, which train and submit write", code="no-file"
        )
    try:
        return load_saved(folder / "config.yaml")
    except ConfigError as error:
        raise Unusable(
            f"{folder}/config.yaml is not of this version of hybridtron: {error}", code="unreadable"
        ) from error


def _queued(jobs: list[str]) -> tuple[list[Queued], str]:
    """Return a run's jobs that are in the queue, and an error message if SLURM can't be asked."""
    try:
        return scheduler.queued(jobs), ""
    except SlurmError as error:
        return [], str(error)
