"""The attempts of a run's jobs, recorded in RUN/slurm/attempts.jsonl, and the decision about another attempt.

An attempt is one start of a job. SLURM starts a requeued job again under the same number, so a job can have several
attempts. A line is appended when an attempt begins, and a second line when it ends. `read` uses an attempt's last line.
If the attempt was killed (a node failed, or a user requeued the job), the second line is written when the next attempt
begins.

The decision depends only on the recorded attempts:

    done   the run has finished
    stop   the configuration was refused, or the last two attempts wrote no newer checkpoint; the user must act
    again  any other case: the job is requeued, without a limit on attempts
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hybridtron.config.checks.export import newest_step
from hybridtron.train.jsonl import read_lines, read_record

FUTILE = 2  # a run is stopped after this number of consecutive attempts without a newer checkpoint
Outcome = Literal["running", "finished", "preempted", "failed", "refused", "lost", "bad nodes"]


@dataclass(frozen=True)
class Attempt:
    """One start of a job.

    job, restart: the job's number, and how often SLURM had restarted the job
    nodes: names of the job's nodes
    began, ended: times in seconds since 1970
    step_before, step: the newest checkpoint's step when the attempt began, and when it ended
    outcome_file: outcome.json's modification time in ns when the attempt began; None if there was no file
    outcome, reason: how the attempt ended
    excluded: nodes that this attempt found to be bad
    decision, why: the decision about another attempt, and its reason
    """

    job: str
    restart: int
    nodes: Sequence[str]
    began: float
    step_before: int
    outcome_file: int | None = None
    ended: float | None = None
    step: int = 0
    outcome: Outcome = "running"
    reason: str = ""
    excluded: Sequence[str] = ()
    decision: Literal["", "done", "again", "stop"] = ""
    why: str = ""

    @property
    def is_futile(self) -> bool:
        """True if the attempt wrote no newer checkpoint. An attempt that found a bad node is never futile."""
        return self.step <= self.step_before and not self.excluded


def decide(history: Sequence[Attempt]) -> Attempt:
    """Decide whether the job is done, runs again or stops, and return the last attempt with decision and reason.

    `history` contains the attempts of jobs that were submitted together, the oldest first.
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
        return replace(last, decision="stop", why=f"another attempt would fail again ({how})")
    if last.excluded:
        return replace(last, decision="again", why=f"without {', '.join(last.excluded)}: {last.reason}")
    if len(futile) == FUTILE and all(attempt.is_futile for attempt in futile):
        where = f"the last {FUTILE} attempts wrote no checkpoint after step {last.step}"
        return replace(last, decision="stop", why=f"{where} ({how}): remove the cause, then submit the run again")
    return replace(last, decision="again", why=f"{how}; the run resumes from step {last.step}")


def path_of(run_dir: Path) -> Path:
    return run_dir / "slurm" / "attempts.jsonl"


def read(run_dir: Path, jobs: Collection[str] | None = None) -> list[Attempt]:
    """Return the attempts of the named jobs, or of all jobs if `jobs` is None. The oldest attempt is first."""
    attempts = {(line["job"], line["restart"]): Attempt(**line) for line in read_lines(path_of(run_dir))}
    return [attempt for attempt in attempts.values() if jobs is None or attempt.job in jobs]


def record(run_dir: Path, attempt: Attempt) -> None:
    """Append a line for an attempt. `read` uses only the last line for each attempt."""
    with path_of(run_dir).open("a") as file:
        file.write(json.dumps(asdict(attempt)) + "\n")


def end_attempt(run_dir: Path, attempt: Attempt, code: int | None, stopped: bool) -> Attempt:
    """Return an attempt with its end: the time, the outcome, the reason, and the newest checkpoint's step.

    The outcome is derived from training's exit code and from outcome.json. `code` is None if the exit code is unknown.
    `stopped` is True if SLURM or a user asked the job to stop. An outcome.json that has not changed since the attempt
    began is ignored, because an earlier attempt wrote it.
    """
    file_written = outcome_written(run_dir)
    outcome_json: dict[str, Any] = {}
    if file_written is not None and file_written != attempt.outcome_file:
        outcome_json = read_record(run_dir / "outcome.json")
    outcome, reason = _outcome(outcome_json, code, stopped)
    return replace(attempt, ended=time.time(), step=newest_step(run_dir), outcome=outcome, reason=reason)


def _outcome(outcome_json: dict[str, Any], code: int | None, stopped: bool) -> tuple[Outcome, str]:
    if code == 0:
        return "finished", ""
    if code == 2:
        return "refused", "the configuration is refused; see the log of rank 0"
    if outcome_json:
        reason = str(outcome_json.get("reason", ""))
        if "rank" in outcome_json:
            reason = f"rank {outcome_json['rank']}: {reason}"
        return outcome_json["outcome"], reason
    if stopped:
        return "preempted", "stopped before the first step"
    if code is None:
        return "lost", "SLURM ended the job: a node failed, or the job was requeued"
    return "failed", f"exit code {code} and no outcome.json; see the logs of the ranks"


def outcome_written(run_dir: Path) -> int | None:
    """Return outcome.json's modification time in ns; None if the file does not exist."""
    path = run_dir / "outcome.json"
    if path.exists():
        return path.stat().st_mtime_ns
    return None
