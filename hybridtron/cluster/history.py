"""The history of a run's jobs (slurm/attempts.jsonl in its folder), and the decision that follows from it.

An attempt is one start of a job; SLURM starts a requeued job again under the same number. An attempt gets a line when
it begins, and a second line, which replaces the first, when it ends. If it was ended from outside (a node failed,
somebody requeued the job), the second line is written when the next attempt begins.

The decision depends on this history alone. A finished run is done. A run whose last two attempts wrote no newer
checkpoint is stopped. Any other run is requeued, without a limit on the number of attempts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hybridtron.config.checks.export import newest_step
from hybridtron.train.records import read_lines, read_record

FUTILE = 2  # attempts in a row without a newer checkpoint after which a run is stopped
Outcome = Literal["running", "finished", "preempted", "failed", "refused", "lost", "bad nodes"]


@dataclass(frozen=True)
class Attempt:
    """One start of a job. Steps are those of the newest checkpoint; times are seconds since the epoch."""

    job: str
    restart: int
    nodes: Sequence[str]
    began: float
    step_before: int
    outcome_file: int | None = None  # time in ns at which an earlier attempt wrote outcome.json
    ended: float | None = None
    step: int = 0
    outcome: Outcome = "running"
    reason: str = ""
    excluded: Sequence[str] = ()  # nodes that this attempt found to be bad
    decision: Literal["", "done", "again", "stop"] = ""  # what follows this attempt
    why: str = ""

    @property
    def is_futile(self) -> bool:
        """True if the attempt made no progress. Finding a bad node counts as progress."""
        return self.step <= self.step_before and not self.excluded


def decide(history: Sequence[Attempt]) -> Attempt:
    """Return the last attempt with the decision that follows: `done`, `again` or `stop`.

    `history` has the attempts of one chain of jobs, oldest first.
    """
    last = history[-1]
    if last.reason:
        how = f"{last.outcome}: {last.reason}"
    else:
        how = last.outcome
    futile = [attempt for attempt in history if not attempt.excluded][-FUTILE:]
    if last.outcome == "finished":
        return replace(last, decision="done", why="the run has finished")
    if last.outcome == "refused":
        return replace(last, decision="stop", why=f"no restart can fix this ({how})")
    if last.excluded:
        return replace(last, decision="again", why=f"without {', '.join(last.excluded)}: {last.reason}")
    if len(futile) == FUTILE and all(attempt.is_futile for attempt in futile):
        where = f"both of the last {FUTILE} attempts ended without a newer checkpoint than step {last.step}"
        return replace(last, decision="stop", why=f"{where} ({how}); fix that and submit the run again")
    return replace(last, decision="again", why=f"{how}; it resumes from step {last.step}")


def path_of(run_dir: Path) -> Path:
    return run_dir / "slurm" / "attempts.jsonl"


def read(run_dir: Path, jobs: Collection[str] | None = None) -> list[Attempt]:
    """Read the attempts of these jobs (None: all jobs), oldest first."""
    attempts = {(line["job"], line["restart"]): Attempt(**line) for line in read_lines(path_of(run_dir))}
    return [attempt for attempt in attempts.values() if jobs is None or attempt.job in jobs]


def record(run_dir: Path, attempt: Attempt) -> None:
    """Append an attempt, or the line that closes it."""
    with path_of(run_dir).open("a") as file:
        file.write(json.dumps(asdict(attempt)) + "\n")


def ended(run_dir: Path, attempt: Attempt, code: int | None, stopped: bool) -> Attempt:
    """Return an attempt with its outcome, from training's exit code (None: unknown) and outcome.json.

    An outcome.json that is as old as the one before this attempt is ignored.
    """
    file_written = outcome_written(run_dir)
    outcome_json: dict[str, Any] = {}
    if file_written is not None and file_written != attempt.outcome_file:
        outcome_json = read_record(run_dir / "outcome.json")
    outcome, reason = _outcome(outcome_json, code, stopped)
    return replace(attempt, ended=time.time(), step=newest_step(run_dir), outcome=outcome, reason=reason)


def _outcome(found: dict[str, Any], code: int | None, stopped: bool) -> tuple[Outcome, str]:
    if code == 0:
        return "finished", ""
    if code == 2:
        return "refused", "the configuration is refused; the log of rank 0 says why"
    if found:
        reason = str(found.get("reason", ""))
        return found["outcome"], f"rank {found['rank']}: {reason}" if "rank" in found else reason
    if stopped:
        return "preempted", "stopped before there was anything to save"
    if code is None:
        return "lost", "SLURM ended it: a node failed, or the job was requeued"
    return "failed", f"exit code {code} and no outcome.json; see the logs of the ranks"


def outcome_written(run_dir: Path) -> int | None:
    """Return the time in ns at which outcome.json was written; None if there is none."""
    path = run_dir / "outcome.json"
    if path.exists():
        return path.stat().st_mtime_ns
    return None
