"""Step guard: refuses a step if its loss or gradient norm is not finite, or if its gradient norm is a spike.

The norm is a spike if

    log(norm) > mean + spike * max(deviation, MIN_DEVIATION)

where mean and deviation are those of log(norm) over the last accepted steps. Logarithms are used because norms fall by
large factors during a run, while the deviation of their logarithms changes little. The gradient norm is computed over
all ranks, so every rank makes the same decision without communication. Checkpoints store the guard's state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

WINDOW = 128  # number of last accepted steps over which mean and deviation are computed
WARMUP_STEPS = 32  # number of accepted steps before a finite norm can be refused, because norms fall steeply at first
MIN_DEVIATION = 0.25  # of log(norm); a healthy run with steady norms still has single norms of 3.5 times the mean


class StepGuard:
    """State of the step guard during a phase.

    spike: largest accepted log(norm) - mean, in deviations of log(norm); None to accept every finite step
    """

    def __init__(self, spike: float | None) -> None:
        self.spike = spike
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.refused = 0  # number of steps that were refused since the last accepted step
        self.why: str | None = None  # reason why the last step was refused; None if it was accepted

    @property
    def limit(self) -> float | None:
        """The largest norm that is accepted; None if every finite norm is accepted."""
        if self.spike is None or len(self.norms) < WARMUP_STEPS:
            return None
        logs = [math.log(norm) for norm in self.norms]
        mean = sum(logs) / len(logs)
        deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))
        return math.exp(min(mean + self.spike * max(deviation, MIN_DEVIATION), 700.0))  # exp(710) overflows

    def accepts(self, norm: float, loss: float) -> bool:
        """Return True if a step is accepted. Records an accepted step's norm, and the reason for a refusal."""
        self.why = self._fault(norm, loss)
        if self.why is not None:
            self.refused += 1
            return False
        self.refused = 0
        if norm > 0:  # a batch without loss tokens has norm 0, which is not counted
            self.norms.append(norm)
        return True

    def restart(self, norms: Sequence[float] = (), refused: int = 0) -> None:
        """Set the state to a checkpoint's values, or without arguments to the state at a phase's start."""
        self.norms = deque(norms, maxlen=WINDOW)
        self.refused = refused
        self.why = None

    def _fault(self, norm: float, loss: float) -> str | None:
        """Return the reason to refuse a step; None to accept it."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        limit = self.limit
        if limit is not None and norm > limit:
            return f"the gradient norm is {norm:.4g}, above the limit of {limit:.4g}"
        return None
