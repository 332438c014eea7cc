"""Rules for rolling back a run: when, to which checkpoint, and how often.

A run rolls back after too many refused steps in a row, and when a weight or moment is not finite as a checkpoint is
written. It returns to its newest valid checkpoint, except those that were written while steps were being refused: their
weights may be damaged already. Then it skips the data on which it failed. After MOST_TIMES rollbacks to the same
checkpoint the run ends with an error.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.finite import NotFinite
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.engine.guard import Guard
from hybridtron.train.metrics import Decision
from hybridtron.train.skipped_data import BatchKey, SkippedData
from hybridtron.train.start import candidates

MOST_TIMES = 3  # rollbacks to the same checkpoint


class Diverged(RuntimeError):
    """Raised when rolling back has not helped, or when there is no checkpoint to roll back to."""


class RollbackRequested(Exception):
    """Raised to ask for a rollback after `step`: `what` describes the failure, `advice` what a user might change."""

    def __init__(self, step: int, what: str, advice: str) -> None:
        super().__init__(what)
        self.step = step
        self.what = what
        self.advice = advice


class Rollback:
    """The checkpoints that a run may roll back to: those it has written, and those it could have started from."""

    def __init__(self, config: Config, run_dir: Path, start: Checkpoint | None) -> None:
        self.config = config
        self.run_dir = run_dir
        self.start = start
        self._times: Counter[int] = Counter()

    def checkpoints(self, request: RollbackRequested, written: set[int]) -> list[Checkpoint]:
        """Return the usable checkpoints before the failed step, newest first. Raises Diverged if there is none.

        `written` are the steps whose checkpoints this start has written. The folder may hold those of other starts too.
        """
        written_checkpoints = [
            checkpoint for checkpoint in checkpoints.valid_checkpoints(self.run_dir) if checkpoint.meta.step in written
        ]
        if self.start is None:
            earlier = []
        else:
            earlier = list(candidates(self.start, self.config))
        usable = {
            checkpoint.folder: checkpoint
            for checkpoint in [*written_checkpoints, *earlier]
            if checkpoint.meta.step < request.step and not checkpoint.meta.refused
        }
        if not usable:
            raise Diverged(f"{request.what}, and there is no checkpoint to roll back to; {request.advice}")
        return sorted(usable.values(), key=lambda checkpoint: checkpoint.meta.step, reverse=True)

    def count(self, request: RollbackRequested, to: int) -> int:
        """Count a rollback to step `to` and return the count so far. Raises Diverged beyond MOST_TIMES."""
        self._times[to] += 1
        if self._times[to] > MOST_TIMES:
            times = f"and the run has returned to its checkpoint of step {to} {MOST_TIMES} times already"
            raise Diverged(f"{request.what}, {times}; {request.advice}")
        return self._times[to]


def check_refused(step: int, is_last: bool, guard: Guard, optim: OptimConfig) -> None:
    """Raise RollbackRequested if too many consecutive steps, up to this one, were refused: `optim.skips`.

    At the last step of a run two are too many, since no later step can show a recovery. One is too many if the phase
    has no accepted step.
    """
    refused = guard.refused
    at_end = is_last and refused > 0 and (refused > 1 or not guard.norms)
    if at_end or refused >= optim.skips:
        last = "" if refused >= optim.skips else ", the run's last"
        raise RollbackRequested(step, f"{refused} steps in a row were refused up to step {step}{last}", _advice(optim))


def not_saved(step: int, fault: NotFinite) -> RollbackRequested:
    """Build the rollback request for a checkpoint that was not written, since a value in it is not finite."""
    advice = "look for a learning rate that is too high, or a broken device"
    return RollbackRequested(step, f"no checkpoint of step {step} was written, as {fault}", advice)


def _advice(optim: OptimConfig) -> str:
    return (
        "logs/decisions.jsonl says why each was. Look for bad data, a learning rate that is too high, or a broken "
        f"device; larger optim.skips, or optim.spike (now {optim.spike}; null takes every finite step), allows more"
    )


def refusal_event(step: int, guard: Guard, loss: float, *, norm: float, data: BatchKey) -> Decision:
    """Build the decision record of a refused step."""
    assert guard.why is not None
    return Decision(step, "refused", guard.why, loss, norm, guard.limit, in_a_row=guard.refused, data=data)


def rollback_event(request: RollbackRequested, to: int, times: int, skipped: SkippedData) -> Decision:
    """Build the decision record of a rollback to step `to`, the `times`-th to this step."""
    named = ", ".join(f"steps {skip.first} to {skip.end - 1} of phases.{skip.phase}" for skip in skipped.all)
    why = f"{request.what}; on from step {to}, skipping the data of {named}, counted from 0"
    return Decision(request.step, "rolled back", why, to=to, times=times, windows=skipped.all)
