"""Rolling back: to which checkpoint, how often, and which data is skipped afterwards.

A run rolls back after too many refused steps in a row, and where a checkpoint would hold a weight or moment that is not
finite. The weights may have gone wrong before that was seen, so it returns to its newest whole checkpoint, but never to
one that was written while steps were being refused, and then skips the data that it failed on. A run that has returned
to the same checkpoint too many times ends.
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
from hybridtron.train.skipped_data import SkippedData
from hybridtron.train.start import candidates

MOST_TIMES = 3  # to the same checkpoint


class Diverged(RuntimeError):
    """Steps are refused, and rolling back does not help, or there is no checkpoint for it."""


class RollbackRequested(Exception):
    """Training has failed, as was seen after this step: in words, with what a person might do."""

    def __init__(self, step: int, what: str, advice: str) -> None:
        super().__init__(what)
        self.step, self.what, self.advice = step, what, advice


class Rollback:
    """The checkpoints that a run may roll back to: those it wrote itself, and those that it could start from."""

    def __init__(self, config: Config, run_dir: Path, start: Checkpoint | None) -> None:
        self.config, self.run_dir, self.start = config, run_dir, start
        self._times: Counter[int] = Counter()

    def checkpoints(self, request: RollbackRequested, written: set[int]) -> list[Checkpoint]:
        """The newest first; a folder may hold others, of a run before this one. Raises Diverged if there is none."""
        own = [one for one in checkpoints.valid_checkpoints(self.run_dir) if one.meta.step in written]
        before = [] if self.start is None else list(candidates(self.start, self.config))
        found = {one.folder: one for one in [*own, *before] if one.meta.step < request.step and not one.meta.refused}
        if not found:
            raise Diverged(f"{request.what}, and there is no checkpoint to roll back to; {request.advice}")
        return sorted(found.values(), key=lambda one: one.meta.step, reverse=True)

    def count(self, request: RollbackRequested, to: int) -> int:
        """How often the run has now returned to this step. Raises Diverged if that is too often."""
        self._times[to] += 1
        if self._times[to] > MOST_TIMES:
            times = f"and the run has returned to its checkpoint of step {to} {MOST_TIMES} times already"
            raise Diverged(f"{request.what}, {times}; {request.advice}")
        return self._times[to]


def check_refused(step: int, is_last: bool, guard: Guard, optim: OptimConfig) -> None:
    """Request a rollback after too many steps in a row, up to this one, that were refused.

    At the end of a run two are too many, as nothing follows that could show whether it recovers, and one is where
    no step of the phase was accepted.
    """
    refused = guard.refused
    at_end = is_last and refused > 0 and (refused > 1 or not guard.norms)
    if at_end or refused >= optim.skips:
        last = "" if refused >= optim.skips else ", the run's last"
        raise RollbackRequested(step, f"{refused} steps in a row were refused up to step {step}{last}", _advice(optim))


def not_saved(step: int, fault: NotFinite) -> RollbackRequested:
    """The checkpoint of this step would have held what is no number."""
    advice = "look for a learning rate that is too high, or a broken device"
    return RollbackRequested(step, f"no checkpoint of step {step} was written, as {fault}", advice)


def _advice(optim: OptimConfig) -> str:
    return (
        "logs/decisions.jsonl says why each was. Look for bad data, a learning rate that is too high, or a broken "
        f"device; larger optim.skips, or optim.spike (now {optim.spike}; null takes every finite step), allows more"
    )


def refusal_event(step: int, guard: Guard, loss: float, norm: float) -> Decision:
    """A step was refused."""
    assert guard.why is not None
    return Decision(step, "refused", guard.why, loss, norm, guard.limit, guard.refused)


def rollback_event(request: RollbackRequested, to: int, times: int, skipped: SkippedData) -> Decision:
    """The run has rolled back."""
    named = ", ".join(f"steps {one.first} to {one.end - 1} of phases.{one.phase}" for one in skipped.all)
    why = f"{request.what}; on from step {to}, skipping the data of {named}, counted from 0"
    return Decision(request.step, "rolled back", why, to=to, times=times, windows=skipped.all)
