"""Shapes of the learning rate after the warm-up; `optim.schedule` names a shape.

A shape maps a step's position in the schedule to a height from 0 to 1. The height 1 means the peak rate. The height 0
means the final rate, which is `optim.final_lr` times the peak. In between, the rate depends linearly on the height.
A schedule covers a phase and the `lr_piece=carry_on` phases directly after it. To add a shape, write a function and
add an entry to `SHAPES` (docs/extending.md). Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LrPosition:
    """A step's position in its schedule, in tokens. The time before the warm-up (`optim.hold`) is not counted.

    tokens: tokens from the schedule's start to the step's end
    warmup: length of the warm-up, which is at the schedule's start
    whole: the schedule's length
    decay: length of the decay at the schedule's end (`optim.decay`); 0 for shapes without `uses_decay`
    """

    tokens: int
    warmup: int
    whole: int
    decay: int = 0

    def progress_since(self, start: int) -> float:
        """Return the progress since `start`: 0 at or before `start`, and 1 at the schedule's end."""
        return min(max((self.tokens - start) / max(self.whole - start, 1), 0.0), 1.0)


@dataclass(frozen=True)
class LrShape:
    """A shape for the learning rate.

    height: function from a position to a number from 0 (final rate) to 1 (peak rate)
    uses_decay: True if the shape depends on `optim.decay`
    """

    height: Callable[[LrPosition], float]
    uses_decay: bool = False

    @property
    def falls(self) -> bool:
        """True if the shape ends at the final rate."""
        return self.height(LrPosition(tokens=1, warmup=0, whole=1, decay=1)) == 0


def cosine(at: LrPosition) -> float:
    """Return the height of half a cosine wave, from 1 at the warm-up's end to 0 at the schedule's end."""
    return (1 + math.cos(math.pi * at.progress_since(at.warmup))) / 2


def linear(at: LrPosition) -> float:
    """Return a straight line's height, from 1 at the warm-up's end to 0 at the schedule's end."""
    return 1 - at.progress_since(at.warmup)


def wsd(at: LrPosition) -> float:
    """Return 1 until the last `optim.decay` tokens, then the height of a straight line to 0.

    The name stands for warm-up, stable, decay. Without a decay the height is 1 everywhere, also at the end of a last
    step that reads more tokens than the schedule has.
    """
    if at.decay == 0:
        return 1.0
    return 1 - at.progress_since(at.whole - at.decay)


def constant(_: LrPosition) -> float:
    """Return 1, so that the rate stays at the peak; `optim.final_lr` has no effect."""
    return 1.0


SHAPES: dict[str, LrShape] = {
    "cosine": LrShape(cosine),
    "linear": LrShape(linear),
    "wsd": LrShape(wsd, uses_decay=True),
    "constant": LrShape(constant),
}
