"""Going back: to which checkpoint, how often, and what is left out then.

A run goes back after too many refused steps in a row, and where a checkpoint would hold a weight or moment that is not
finite. The weights may have been on their way to ruin before that was seen, so the run goes back to its newest whole
checkpoint, but to none that was written while steps were being refused, and reads on after the data that it failed on.
A run that has come back to the same checkpoint too many times ends.
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
from hybridtron.train.start import candidates
from hybridtron.train.windows import Windows

MOST_TIMES = 3  # to the same checkpoint


class Diverged(RuntimeError):
    """Steps are refused, and going back does not help, or there is nothing to go back to."""


class GoBack(Exception):
    """Training has failed, as was seen after this step: in words, with what a person might do."""

    def __init__(self, step: int, what: str, advice: str) -> None:
        super().__init__(what)
        self.step, self.what, self.advice = step, what, advice


class WayBack:
    """The checkpoints that a run may go back to: those it wrote itself, and those that it could start from."""

    def __init__(self, config: Config, run_dir: Path, start: Checkpoint | None) -> None:
        self.config, self.run_dir, self.start = config, run_dir, start
        self._times: Counter[int] = Counter()

    def checkpoints(self, failed: GoBack, written: set[int]) -> list[Checkpoint]:
        """The newest first; a folder may hold others, of a run before this one. Raises Diverged if there is none."""
        own = [one for one in checkpoints.valid_checkpoints(self.run_dir) if one.meta.step in written]
        before = [] if self.start is None else list(candidates(self.start, self.config))
        found = {one.folder: one for one in [*own, *before] if one.meta.step < failed.step and not one.meta.refused}
        if not found:
            raise Diverged(f"{failed.what}, and there is no checkpoint to go back to; {failed.advice}")
        return sorted(found.values(), key=lambda one: one.meta.step, reverse=True)

    def count(self, failed: GoBack, to: int) -> int:
        """How often the run has now gone back to this step. Raises Diverged if that is too often."""
        self._times[to] += 1
        if self._times[to] > MOST_TIMES:
            times = f"and the run has gone back to its checkpoint of step {to} {MOST_TIMES} times already"
            raise Diverged(f"{failed.what}, {times}; {failed.advice}")
        return self._times[to]


def too_many_refused(step: int, refused: int, optim: OptimConfig) -> GoBack:
    """So many steps in a row were refused, up to this one."""
    last = "" if refused >= optim.skips else ", the run's last"
    return GoBack(step, f"{refused} steps in a row were refused up to step {step}{last}", _advice(optim))


def not_saved(step: int, fault: NotFinite) -> GoBack:
    """The checkpoint of this step would have held what is no number."""
    advice = "look for a learning rate that is too high, or a broken device"
    return GoBack(step, f"no checkpoint of step {step} was written, as {fault}", advice)


def _advice(optim: OptimConfig) -> str:
    return (
        "logs/decisions.jsonl says why each was. Look for bad data, a learning rate that is too high, or a broken "
        f"device; larger optim.skips, or optim.spike (now {optim.spike}; null takes every finite step), allows more"
    )


def refusal_of(step: int, guard: Guard, loss: float, norm: float) -> Decision:
    """That a step was refused."""
    assert guard.why is not None
    limit, in_a_row = guard.limit, guard.refused
    return Decision(step, "refused", guard.why, loss, norm, limit, in_a_row)


def return_of(failed: GoBack, to: int, times: int, windows: Windows) -> Decision:
    """That the run has gone back."""
    left_out = ", ".join(f"steps {w.first} to {w.end - 1} of phases.{w.phase}" for w in windows.all)
    why = f"{failed.what}; on from step {to}, leaving out the data of {left_out}, counted from 0"
    return Decision(failed.step, "gone back", why, to=to, times=times, windows=windows.as_lists())
