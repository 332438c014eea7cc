"""What a run's jobs came to, start by start (slurm/attempts.jsonl in its folder), and what comes next.

One attempt is one start of a job; SLURM starts a requeued job again under the same number. An attempt gets a line when
it begins, and a second line, which replaces the first, when it ends. An attempt that was ended from outside (a node
failed, somebody requeued the job) has no second line until the next one begins and finds that out.

What comes next is decided from this alone: a finished run is done; a run whose last two attempts wrote no newer
checkpoint is stopped; any other run is requeued, however often.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

FUTILE = 2  # attempts in a row without a newer checkpoint, after which there is no other
Outcome = Literal["running", "finished", "preempted", "failed", "refused", "lost", "bad nodes"]
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Attempt:
    """One start of a job. Steps are those of the newest checkpoint; times are seconds since the epoch."""

    job: str
    restart: int
    nodes: tuple[str, ...]
    began: float
    step_before: int
    outcome_file: int | None = None  # when outcome.json was last written, in ns: of an earlier attempt
    ended: float | None = None
    step: int = 0
    outcome: Outcome = "running"
    reason: str = ""
    excluded: tuple[str, ...] = ()  # nodes that this attempt found to be bad
    decision: str = ""
    why: str = ""

    @property
    def is_futile(self) -> bool:
        """Whether it made no progress; finding a bad node counts as progress."""
        return self.step <= self.step_before and not self.excluded


@dataclass(frozen=True)
class NextStart:
    """What comes after an attempt: `done`, `again`, or `stop`."""

    word: Literal["done", "again", "stop"]
    why: str


def decide(history: Sequence[Attempt]) -> NextStart:
    """What comes after the last of these attempts, all of one chain of jobs."""
    last = history[-1]
    how = f"{last.outcome}: {last.reason}" if last.reason else last.outcome
    if last.outcome == "finished":
        return NextStart("done", "the run has finished")
    if last.outcome == "refused":
        return NextStart("stop", f"no restart can fix this ({how})")
    futile = [attempt for attempt in history if not attempt.excluded][-FUTILE:]
    if not last.excluded and len(futile) == FUTILE and all(attempt.is_futile for attempt in futile):
        where = f"both of the last {FUTILE} attempts ended without a newer checkpoint than step {last.step}"
        return NextStart("stop", f"{where} ({how}); fix that and submit the run again")
    if last.excluded:
        return NextStart("again", f"without {', '.join(last.excluded)}: {last.reason}")
    return NextStart("again", f"{how}; it resumes from step {last.step}")


def path_of(run_dir: Path) -> Path:
    return run_dir / "slurm" / "attempts.jsonl"


def read(run_dir: Path, jobs: Collection[str] | None = None) -> list[Attempt]:
    """The attempts of these jobs, or of all, in the order in which they began."""
    found: dict[tuple[str, int], Attempt] = {}
    if path_of(run_dir).exists():
        for line in path_of(run_dir).read_text().splitlines():
            with suppress(json.JSONDecodeError):  # cut short by a kill
                attempt = _attempt(json.loads(line))
                found[attempt.job, attempt.restart] = attempt
    return [attempt for attempt in found.values() if jobs is None or attempt.job in jobs]


def record(run_dir: Path, attempt: Attempt) -> None:
    """Add an attempt, or how it ended."""
    with path_of(run_dir).open("a") as file:
        file.write(json.dumps(asdict(attempt)) + "\n")


def ended(run_dir: Path, attempt: Attempt, now: float, code: int | None, stopped: bool) -> Attempt:
    """An attempt with how it ended, by the exit code of training (None: it is not known) and outcome.json."""
    written = outcome_written(run_dir)
    found: dict[str, Any] = {}
    if written is not None and written != attempt.outcome_file:
        with suppress(json.JSONDecodeError):
            found = json.loads((run_dir / "outcome.json").read_text())
    outcome, reason = _outcome(found, code, stopped)
    return replace(attempt, ended=now, step=newest_step(run_dir), outcome=outcome, reason=reason)


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
    """When outcome.json was written, by its file system."""
    path = run_dir / "outcome.json"
    return path.stat().st_mtime_ns if path.exists() else None


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint that was sealed; 0 without one. Whether it is sound, the run finds out."""
    sealed = (path.parent.name for path in (run_dir / "checkpoints").glob("step-*/manifest.json"))
    return max((int(matched[1]) for name in sealed if (matched := _STEP.fullmatch(name))), default=0)


def _attempt(line: dict[str, Any]) -> Attempt:
    fields: dict[str, Any] = {**line, "nodes": tuple(line["nodes"]), "excluded": tuple(line["excluded"])}
    return Attempt(**fields)
