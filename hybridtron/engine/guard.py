"""Step guard: refuses steps whose loss or gradients are not finite, or whose gradient norm is far above the usual.

The usual is the distribution of log(norm) over the last accepted steps: norms are positive, and over a run they fall by
factors, which leaves the spread of their logarithms as it is. A step is refused if

    log(norm) > mean + spike * max(deviation, LEAST_DEVIATION)

The norm is that over all ranks, so every rank reaches the same verdict without communication. Refused norms don't enter
the distribution. The state consists of plain numbers, which a checkpoint holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

WINDOW = 128  # number of accepted steps in the distribution
ENOUGH = 32  # accepted steps before any finite norm is refused: at the start of training norms fall steeply
LEAST_DEVIATION = 0.25  # of log(norm): if norms hardly vary, single norms in healthy runs reach 3.5 times the mean


class Guard:
    """State of the step guard during a phase. With `spike` None, every finite step is accepted."""

    def __init__(self, spike: float | None) -> None:
        self.spike = spike
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.refused = 0  # number of refused steps in a row, up to now
        self.why: str | None = None  # reason if the last step was refused

    @property
    def limit(self) -> float | None:
        """The largest accepted norm; None while every finite norm is accepted."""
        if self.spike is None or len(self.norms) < ENOUGH:
            return None
        logs = [math.log(norm) for norm in self.norms]
        mean = sum(logs) / len(logs)
        deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))
        return math.exp(min(mean + self.spike * max(deviation, LEAST_DEVIATION), 700.0))  # exp(710) overflows

    def accepts(self, norm: float, loss: float) -> bool:
        """Decide if the step is taken, and record its norm or its refusal."""
        self.why = self._fault(norm, loss)
        if self.why is not None:
            self.refused += 1
            return False
        self.refused = 0
        if norm > 0:  # a batch with only masked tokens has no gradient, and says nothing about other norms
            self.norms.append(norm)
        return True

    def restart(self, norms: Sequence[float] = (), refused: int = 0) -> None:
        """Continue from a checkpoint's values, or start over without any: each phase has its own usual norms."""
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
