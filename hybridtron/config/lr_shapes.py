"""Shapes for the learning rate after its warm-up, by name, as `optim.schedule` selects them.

A shape is a pure function of a step's position in its schedule, which spans a phase and the phases that carry on its
rate. It returns 1 for the peak and 0 for the final rate. To add one, write a function and a line in `SHAPES`
(docs/extending.md). Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LrPosition:
    """A step's position in its schedule, in tokens.

    The run has read `tokens` out of the `whole` schedule after the step; the first `warmup` are the warm-up. `decay` is
    the final decay's length, as `optim.decay` sets it; 0 for shapes without one.
    """

    tokens: int
    warmup: int
    whole: int
    decay: int = 0

    def progress_since(self, start: int) -> float:
        """Return the progress, which runs from 0 at `start` to 1 at the schedule's end."""
        return min(max((self.tokens - start) / max(self.whole - start, 1), 0.0), 1.0)


@dataclass(frozen=True)
class LrShape:
    """A shape, with a flag for shapes that use `optim.decay`."""

    height: Callable[[LrPosition], float]
    uses_decay: bool = False

    @property
    def falls(self) -> bool:
        """True if the shape ends at the final rate."""
        return self.height(LrPosition(tokens=1, warmup=0, whole=1, decay=1)) == 0


def cosine(at: LrPosition) -> float:
    """Return half a cosine from the end of the warm-up to the schedule's end."""
    return (1 + math.cos(math.pi * at.progress_since(at.warmup))) / 2


def linear(at: LrPosition) -> float:
    """Return a straight line from the end of the warm-up to the schedule's end."""
    return 1 - at.progress_since(at.warmup)


def wsd(at: LrPosition) -> float:
    """Return warm-up, stable, decay: the peak, then a straight line over the last `optim.decay` tokens."""
    return 1 - at.progress_since(at.whole - at.decay)


def constant(_: LrPosition) -> float:
    """Return the peak until the end; `optim.final_lr` has no effect."""
    return 1.0


SHAPES: dict[str, LrShape] = {
    "cosine": LrShape(cosine),
    "linear": LrShape(linear),
    "wsd": LrShape(wsd, uses_decay=True),
    "constant": LrShape(constant),
}
