"""Rules for rolling back a run: when, to which checkpoint, and how often.

A refused step is a step whose update was discarded, because its loss or gradients were abnormal. A run rolls back after
too many refused steps in a row, and when a checkpoint that it writes has a weight or optimizer moment that is not
finite. It returns to its newest valid checkpoint that was not written right after a refused step: after a refused step
the weights may already be damaged. When the run continues, it skips the data of the steps after that checkpoint, up to
and including the failed step. A run rolls back at most MAX_ROLLBACKS times to the same checkpoint. If it would have to
roll back once more, it ends with an error.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.finite import NotFinite
from hybridtron.checkpoint.local import LocalCheckpoint
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.engine.step_guard import StepGuard
from hybridtron.train.metrics import Decision
from hybridtron.train.skipped_data import BatchKey, SkippedData
from hybridtron.train.start import candidates

MAX_ROLLBACKS = 3  # rollbacks to the same checkpoint


class Diverged(RuntimeError):
    """Raised when rollbacks have not helped, or when there is no checkpoint to roll back to."""


class RollbackRequested(Exception):
    """Raised to request a rollback after the failed step `step`.

    `what` describes the failure, and `advice` says how a user might prevent it. `newest` is the last step whose
    checkpoint may be restored. `skips_data` is False if the data can't be the cause: the run then reads them again.
    """

    def __init__(
        self, step: int, what: str, advice: str, *, newest: int | None = None, skips_data: bool = True
    ) -> None:
        super().__init__(what)
        self.step = step
        self.what = what
        self.advice = advice
        self.newest = step - 1 if newest is None else newest
        self.skips_data = skips_data


class Rollback:
    """Finds the checkpoints to which a run may roll back, and limits the number of rollbacks to each checkpoint.

    `start` is the checkpoint from which the run resumed when it was last started, or None if it began from scratch.
    """

    def __init__(self, config: Config, run_dir: Path, start: Checkpoint | None) -> None:
        self.config = config
        self.run_dir = run_dir
        self.start = start
        self._times: Counter[int] = Counter()

    def checkpoints(self, request: RollbackRequested, written: set[int]) -> list[Checkpoint]:
        """Return the usable checkpoints before the failed step, newest first. Raises Diverged if there are none.

        Two kinds of checkpoints are usable: checkpoints written since the run was last started (`written` has their
        steps), and checkpoints from which the run could have resumed. The run's folder may have other checkpoints, for
        example if `run.resume` names a single checkpoint.
        """
        written_checkpoints = [
            checkpoint for checkpoint in checkpoints.valid_checkpoints(self.run_dir) if checkpoint.meta.step in written
        ]
        if self.start is None:
            earlier = []
        else:
            # without local checkpoints: a newer local checkpoint may have replaced them
            earlier = [entry for entry in candidates(self.start, self.config) if not isinstance(entry, LocalCheckpoint)]
        usable = {
            checkpoint.folder: checkpoint
            for checkpoint in [*written_checkpoints, *earlier]
            if checkpoint.meta.step <= request.newest and not checkpoint.meta.refused
        }
        if not usable:
            raise Diverged(f"{request.what}, and there is no checkpoint to roll back to; {request.advice}")
        return sorted(usable.values(), key=lambda checkpoint: checkpoint.meta.step, reverse=True)

    def count(self, request: RollbackRequested, to: int) -> int:
        """Count a rollback to step `to`, and return the number of rollbacks to `to` so far.

        Raises Diverged if the number exceeds MAX_ROLLBACKS.
        """
        self._times[to] += 1
        if self._times[to] > MAX_ROLLBACKS:
            times = f"and the run has already rolled back to its checkpoint of step {to} {MAX_ROLLBACKS} times"
            raise Diverged(f"{request.what}, {times}; {request.advice}")
        return self._times[to]


def check_refused(step: int, is_last: bool, guard: StepGuard, optim: OptimConfig) -> None:
    """Raise RollbackRequested if this step and too many steps directly before it were refused.

    The limit is `optim.skips` consecutive refused steps. At the run's last step the limit is at most 2, since no later
    step can show that training has recovered. If the last phase has no accepted step, that limit is 1.
    """
    refused = guard.refused
    at_end = is_last and refused > 0 and (refused > 1 or not guard.norms)
    if at_end or refused >= optim.skips:
        last = "" if refused >= optim.skips else ", the run's last"
        raise RollbackRequested(step, f"{refused} steps in a row were refused up to step {step}{last}", _advice(optim))


def not_saved(step: int, fault: NotFinite) -> RollbackRequested:
    """Build the rollback request for a checkpoint that was not written because a value in it is not finite."""
    advice = "look for a learning rate that is too high, or a broken device"
    return RollbackRequested(step, f"no checkpoint of step {step} was written, as {fault}", advice)


def _advice(optim: OptimConfig) -> str:
    return (
        "logs/decisions.jsonl has the reasons. Look for bad data, a learning rate that is too high or a broken device. "
        f"To refuse fewer steps raise optim.spike (now {optim.spike}; null accepts every finite step); to roll back "
        "later raise optim.skips"
    )


def refusal_event(step: int, guard: StepGuard, loss: float, *, norm: float, data: BatchKey) -> Decision:
    """Build the decision record for a refused step."""
    assert guard.why is not None
    return Decision(step, "refused", guard.why, loss, norm, guard.limit, in_a_row=guard.refused, data=data)


def rollback_event(request: RollbackRequested, to: int, times: int, skipped: SkippedData) -> Decision:
    """Build the decision record for a rollback to step `to`; `times` counts the rollbacks to that step."""
    named = ", ".join(f"steps {skip.first} to {skip.end - 1} of phases.{skip.phase}" for skip in skipped.all)
    why = f"{request.what}; training continues from step {to}"
    if request.skips_data:
        why += f" without the data of {named}, counted from 0"
    return Decision(request.step, "rolled back", why, to=to, times=times, windows=skipped.all)
