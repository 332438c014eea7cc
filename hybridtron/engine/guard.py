"""Which steps are refused: whose loss or gradients are not finite, or whose gradient norm is far above the usual.

The usual is the distribution of log(norm) over the last accepted steps: norms are positive, and over a run they fall
by factors, which leaves the spread of their logarithms as it is. A step is refused if

    log(norm) > mean + spike * max(deviation, LEAST_DEVIATION)

The norm is that over all ranks, so every rank comes to the same verdict without asking the others. Refused norms don't
enter the distribution. Everything here is plain numbers, which a checkpoint holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

WINDOW = 128  # accepted steps that the distribution is taken from
ENOUGH = 32  # accepted steps before which no finite norm is refused: at the start of training norms fall steeply
LEAST_DEVIATION = 0.25  # of log(norm): where norms hardly vary, single ones of healthy runs reach 3.5 times the mean


class Guard:
    """Judges the steps of a phase, one after another; `spike` is None where every finite step is taken."""

    def __init__(self, spike: float | None) -> None:
        self.spike = spike
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.refused = 0  # steps in a row, up to now
        self.why: str | None = None  # the last step was refused

    @property
    def limit(self) -> float | None:
        """The greatest norm that is accepted; None while every finite one is."""
        if self.spike is None or len(self.norms) < ENOUGH:
            return None
        logs = [math.log(norm) for norm in self.norms]
        mean = sum(logs) / len(logs)
        deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))
        return math.exp(min(mean + self.spike * max(deviation, LEAST_DEVIATION), 700.0))  # exp(710) overflows

    def accepts(self, norm: float, loss: float) -> bool:
        """Whether the step is taken, and remember it."""
        self.why = self._fault(norm, loss)
        if self.why is not None:
            self.refused += 1
            return False
        self.refused = 0
        if norm > 0:  # a row of masked tokens alone has no gradient, which says nothing of others
            self.norms.append(norm)
        return True

    def restart(self, norms: Sequence[float] = (), refused: int = 0) -> None:
        """Continue from what a checkpoint holds, or from scratch: in another phase other norms are usual."""
        self.norms = deque(norms, maxlen=WINDOW)
        self.refused, self.why = refused, None

    def _fault(self, norm: float, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        limit = self.limit
        if limit is not None and norm > limit:
            return f"the gradient norm is {norm:.4g}, above the limit of {limit:.4g}"
        return None
