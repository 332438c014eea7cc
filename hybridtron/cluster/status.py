"""The state of runs: hybridtron status [RUN_FOLDER ...]     (without a folder: all below runs/)

State, phase, step, speed, loss, starts of the job, and when the run will be done, from the run's folder, and from
SLURM's queue where there is one. The time to the end is that of the tokens that are left, at the speed of the last
steps: waiting in the queue, evaluations and checkpoints are not in it. Nothing is changed, and no torch is imported.
Exit codes: 0 shown, 2 a folder is missing or holds no run.
"""

from __future__ import annotations

import argparse
import sys
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
from hybridtron.config.resolve import last_step, resolve
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.problems import ConfigError
from hybridtron.train.outcome import clock
from hybridtron.train.records import read_lines, read_record

RECENT = 20  # steps whose speed is averaged
TAIL = 2**20  # bytes of metrics.jsonl that are read; a step with many numbers takes some hundred
WIDTH = 200  # characters of a line where there is no terminal
SILENT_S = 1800.0  # without a step or a word of its end, a run without SLURM is said to be silent


class NoRun(Exception):
    """A folder without a run; the message says why."""


@dataclass(frozen=True)
class Status:
    """What is known of a run; None where it can't be."""

    folder: Path
    state: str
    why: str
    phase: str | None
    step: int
    last: int
    tokens_per_second: float | None
    loss: float | None
    starts: int
    jobs: tuple[Queued, ...]
    left_s: float | None


def main(arguments: list[str]) -> int:
    """Print a table, and a line of reasons for each run that has them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hybridtron status", description="State, speed and remaining time of runs.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN_FOLDER", help="default: all below runs/")
    folders: list[Path] = parser.parse_args(arguments).folders
    folders = folders or sorted(path.parent for path in Path("runs").glob("*/config.yaml"))
    try:
        if not folders:
            raise NoRun("there is no run below runs/ here: name a run's folder")
        found = [status(folder) for folder in folders]
    except NoRun as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    show(found, console if console.is_terminal else Console(width=WIDTH))
    return 0


def status(folder: Path) -> Status:
    """How a run stands. Raises NoRun for a folder that holds none."""
    config = _config(folder)
    lines = read_lines(folder / "metrics.jsonl", TAIL)[-RECENT:]
    attempts = history.read(folder)
    submission = read_record(folder / "slurm" / "submission.json")
    jobs, fault = _queued(submission.get("jobs", []))
    step = lines[-1]["step"] if lines else 0
    last = last_step(config)
    speed = _speed(lines)
    state, why = _state(folder, attempts, jobs, submission, lines)
    left = None if speed is None or state == "finished" else _tokens_left(config, step) / speed
    return Status(
        folder=folder,
        state=state,
        why="; ".join(filter(None, [why, fault])),
        phase=_phase(config, step) if lines else None,
        step=step,
        last=last,
        tokens_per_second=speed,
        loss=lines[-1]["loss"] if lines else None,
        starts=len(attempts),
        jobs=tuple(jobs),
        left_s=left,
    )


def show(found: Sequence[Status], console: Console) -> None:
    table = Table("run", "state", "job", "phase", "step", "tokens/s", "loss", "starts", "left", "done at", box=None)
    for one in found:
        done_at = "" if one.left_s is None else time.strftime("%F %H:%M", time.localtime(time.time() + one.left_s))
        table.add_row(
            str(one.folder),
            one.state,
            ", ".join(f"{job.job} {job.state.lower()}" for job in one.jobs),
            one.phase or "",
            f"{one.step}/{one.last}",
            "" if one.tokens_per_second is None else readable(one.tokens_per_second),
            "" if one.loss is None else f"{one.loss:.4f}",
            str(one.starts or ""),
            "" if one.left_s is None else clock(one.left_s),
            done_at if one.state == "running" else "",
        )
    console.print(table)
    for one in found:
        if one.why:
            console.print(f"{one.folder}: {one.why}", highlight=False, soft_wrap=True, markup=False)


def _state(
    folder: Path, attempts: list[Attempt], jobs: list[Queued], submission: dict[str, Any], lines: list[dict[str, Any]]
) -> tuple[str, str]:
    """One word, and what more there is to say."""
    if running := [job for job in jobs if job.state == "RUNNING"]:
        return "running", f"on {running[0].nodes}"
    if jobs:
        before = f"; before that {attempts[-1].outcome}: {attempts[-1].why}" if attempts and attempts[-1].why else ""
        return "queued", f"job {jobs[0].job} waits ({jobs[0].reason}), start {jobs[0].start}{before}"
    if submission.get("error"):
        return "not submitted", str(submission["error"])
    if attempts and attempts[-1].decision == "stop":
        return "stopped", attempts[-1].why
    outcome = read_record(folder / "outcome.json")
    if outcome:
        where = f"rank {outcome['rank']}: " if "rank" in outcome else ""
        return str(outcome["outcome"]), f"{where}{outcome['reason']}" if "reason" in outcome else ""
    if not lines:
        return "begun", "no step yet, and no word of an end"
    silent = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    return ("running", "") if silent < SILENT_S else ("silent", f"the last step was {clock(silent)} ago")


def _config(folder: Path) -> Config:
    if not folder.is_dir():
        raise NoRun(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    if not (folder / "config.yaml").exists():
        raise NoRun(f"{folder} holds no run: a run's folder has config.yaml, which train and submit write")
    try:
        return load_saved(folder / "config.yaml")
    except ConfigError as error:
        raise NoRun(f"{folder}/config.yaml is not of this version of hybridtron: {error}") from error


def _queued(jobs: list[str]) -> tuple[list[Queued], str]:
    """Those of a run's jobs that are in the queue, and why that can't be known."""
    if not jobs or not scheduler.is_here():
        return [], "squeue is not here, so that its jobs can't be looked up" if jobs else ""
    try:
        return scheduler.queued(jobs), ""
    except SlurmError as error:
        return [], str(error)


def _speed(lines: list[dict[str, Any]]) -> float | None:
    """Tokens a second over the last steps of one phase, without the first step, which starts everything."""
    same = [line for line in lines if line["phase"] == lines[-1]["phase"]]
    counted = same[1:] or same
    taken = sum(line["step_time"] for line in counted)
    tokens = sum(line["tokens_per_second"] * line["step_time"] for line in counted)
    return tokens / taken if taken > 0 else None


def _phase(config: Config, step: int) -> str:
    phases = resolve(config)
    now = next((phase for phase in phases if step < phase.end_step), phases[-1])
    return now.settings.name + (f" ({now.index + 1} of {len(phases)})" if len(phases) > 1 else "")


def _tokens_left(config: Config, step: int) -> int:
    """Tokens of the steps that are still to be done."""
    end = last_step(config)
    return sum(
        phase.phase_tokens_at(min(phase.end_step, end)) - phase.phase_tokens_at(max(phase.start_step, step))
        for phase in resolve(config)
        if phase.end_step > step and phase.start_step < end
    )
