"""The state of runs: hybridtron status [RUN_FOLDER ...]

Without a folder, all runs below runs/ are shown. The table has each run's state, jobs, phase, step, speed, loss, number
of starts, remaining time, and expected end time. The values are read from the run's folder, and from SLURM's queue if
the machine has SLURM. The remaining time is the remaining token count divided by the speed in recent steps, without
time in the queue, evaluations and checkpoints. If folders are named, lines below the table show each run's time by
section (`train/time_log.py`), and the interval between checkpoints that loses the least time. Ranks that are slower
than their peers (`train/slow_ranks.py`) are named by host. The command writes nothing and does not import torch.

Exit codes: 0 shown, 2 a folder is missing or contains no run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridtron.cluster import attempt_log, scheduler
from hybridtron.cluster.attempt_log import Attempt
from hybridtron.cluster.scheduler import Queued, SlurmError
from hybridtron.config.load import load_saved
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, ConfigError, Unusable
from hybridtron.train.jsonl import read_lines, read_record
from hybridtron.train.outcome import clock
from hybridtron.train.supervisor import faults
from hybridtron.train.time_log import read_time

RECENT = 20  # the speed is averaged over this number of last steps
TAIL = 2**20  # bytes read from the end of metrics.jsonl; enough for RECENT lines
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
"""SLURM's job state -> the run's state.

If a run has several jobs, the job whose SLURM state is first in this table determines the run's state.
"""

SILENT_S = 1800.0  # a run outside SLURM is shown as silent after this time without a step


@dataclass(frozen=True)
class Status:
    """A run's state, from its folder and the queue.

    folder, plan: the run's folder and plan
    lines: metrics of the run's last steps, from metrics.jsonl
    attempts: starts of the run's jobs
    jobs: the run's jobs that are queued or running
    state, why: the state as one or two words, and an explanation, which may be empty
    """

    folder: Path
    plan: RunPlan
    lines: list[dict[str, Any]]
    attempts: list[Attempt]
    jobs: list[Queued]
    state: str
    why: str

    @property
    def step(self) -> int:
        """The last step with metrics; 0 before the first step."""
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
        """Speed over the recent steps in the current phase; None before the first step.

        If there are several recent steps, the first step is left out, because its time may include start-up.
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
        """Seconds until the run's end at the current speed; None if the speed is unknown or the run has finished."""
        if (speed := self.tokens_per_second) is None or self.state == "finished":
            return None
        last = self.plan.last_step
        done = min(self.step, last)
        tokens_done = self.plan.phase_ending_at(done).tokens_at(done)
        return (self.plan.phase_ending_at(last).tokens_at(last) - tokens_done) / speed


def main(arguments: list[str]) -> int:
    """Print the table of runs, then the explanations for their states. Returns the exit code."""
    parser = CommandParser(prog="hybridtron status", description="State, speed and remaining time of runs.")
    parser.add_argument("folders", nargs="*", type=path_of, metavar="RUN_FOLDER", help="default: all below runs/")
    folders: list[Path] = parser.parse_args(arguments).folders
    named = bool(folders)
    folders = folders or sorted(path.parent for path in Path("runs").glob("*/config.yaml"))
    if not folders:
        raise Unusable("there is no run below ./runs: name a run's folder", code="no-file")
    statuses = [status(folder) for folder in folders]
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    show(statuses, console)
    if named:
        for run in statuses:
            for line in time_lines(run):
                console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def status(folder: Path) -> Status:
    """Read a run's state. Raises Unusable if the folder contains no run."""
    config = _config(folder)
    lines = read_lines(folder / "metrics.jsonl", TAIL)[-RECENT:]
    attempts = attempt_log.read(folder)
    submission = read_record(folder / "slurm" / "submission.json")
    jobs, fault = _queued(submission.get("jobs", []))
    state, why = _state(folder, attempts, jobs, submission, lines)
    return Status(folder, RunPlan.of(config), lines, attempts, jobs, state, "; ".join(filter(None, [why, fault])))


def show(statuses: Sequence[Status], console: Console) -> None:
    """Print the table of runs; below it a line for each run whose state has an explanation, or that has slow ranks."""
    table = Table("run", "state", "job", "phase", "step", "tokens/s", "loss", "starts", "left", "done at", box=None)
    for run in statuses:
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
    for run in statuses:
        if run.why:
            console.print(f"{run.folder}: {run.why}", highlight=False, soft_wrap=True, markup=False)
        if slow := slow_line(run):
            console.print(slow, highlight=False, soft_wrap=True, markup=False)


def time_lines(run: Status) -> list[str]:
    """Return lines with a run's time by section, and with the best interval between its checkpoints."""
    spent = read_time(run.folder)
    if spent is None:
        return []
    starts = "1 start" if spent.starts == 1 else f"{spent.starts} starts"
    lines = [f"{run.folder}: {clock(spent.total)} in {starts}: {spent.words()}"]
    if survived := faults.read(run.folder):
        lines.append(f"{run.folder}: time lost by cause: {faults.words(survived)}")
    interval = spent.interval()
    if interval is not None:
        lines.append(f"{run.folder}: {interval}")
    return lines


def slow_line(run: Status) -> str | None:
    """Return a line with the ranks that were slow in the run's last step, by host; None if there are none."""
    if not run.lines or not (slow := run.lines[-1].get("slow_ranks")):
        return None
    named = "; ".join(f"{name} is {excess:.0%} slower than its peers" for name, excess in slow.items())
    return f"{run.folder}: at step {run.step} {named}"


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
        return "begun", "no step yet, and no recorded outcome"
    silent = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    if silent < SILENT_S:
        return ("running", "")
    return ("silent", f"the last step was {clock(silent)} ago")


def _state_in_queue(jobs: list[Queued], attempts: list[Attempt]) -> tuple[str, str]:
    """Return the state and an explanation for a run with jobs that have not ended.

    A job state that is not in `STATES` is shown as SLURM writes it, in lower case.
    """
    order = list(STATES)
    job = min(jobs, key=lambda job: order.index(job.state) if job.state in order else len(order))
    slurm_words = job.state.lower().replace("_", " ")
    state = STATES.get(job.state, slurm_words)
    if state == "running":
        return state, f"on {job.nodes}"
    if state == "held":
        return state, f"job {job.job} is held ({job.reason}): release the job with scontrol release {job.job}"
    if state != "queued":
        return state, f"job {job.job} is {slurm_words} on {job.nodes}"
    if attempts and attempts[-1].why:
        before = f"; last attempt {attempts[-1].outcome}: {attempts[-1].why}"
    else:
        before = ""
    return state, f"job {job.job} waits ({job.reason}), expected start {job.start}{before}"


def _config(folder: Path) -> Config:
    """Load a run's configuration. Raises Unusable if config.yaml is missing, or written by an incompatible version."""
    if not folder.is_dir():
        raise Unusable(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist", code="no-file")
    if not (folder / "config.yaml").exists():
        raise Unusable(
            f"{folder} contains no run: name a folder with a config.yaml that `train` or `submit` has written",
            code="no-file",
        )
    try:
        return load_saved(folder / "config.yaml")
    except ConfigError as error:
        raise Unusable(
            f"{folder}/config.yaml can't be read by this version of hybridtron: {error}", code="unreadable"
        ) from error


def _queued(jobs: list[str]) -> tuple[list[Queued], str]:
    """Return (queue entries for these job numbers, error message); the message is empty if SLURM answers."""
    try:
        return scheduler.queued(jobs), ""
    except SlurmError as error:
        return [], str(error)
