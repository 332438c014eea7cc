"""How the learning rate runs after its warm-up: shapes by name, as `optim.schedule` asks for them.

A shape is a pure function of where a step stands in its course (a phase, and those that carry on its rate): 1 is the
peak, 0 the final rate. Another one: a function and a line in `SHAPES` (docs/extending.md). Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LrPosition:
    """Where a step stands, in tokens: after it `tokens` of the course's `whole` are read; `warmup` come first.

    `decay` is how many of the last ones `optim.decay` names; 0 for shapes that don't ask for it.
    """

    tokens: int
    warmup: int
    whole: int
    decay: int = 0

    def progress_since(self, start: int) -> float:
        """From 0 at `start` to 1 at the end of the course."""
        return min(max((self.tokens - start) / max(self.whole - start, 1), 0.0), 1.0)


@dataclass(frozen=True)
class LrShape:
    """A shape, and whether `optim.decay` means something to it."""

    height: Callable[[LrPosition], float]
    uses_decay: bool = False

    @property
    def falls(self) -> bool:
        """Whether the course ends at the final rate."""
        return self.height(LrPosition(tokens=1, warmup=0, whole=1, decay=1)) == 0


def cosine(at: LrPosition) -> float:
    """Half a cosine from the end of the warm-up to the end of the course."""
    return (1 + math.cos(math.pi * at.progress_since(at.warmup))) / 2


def linear(at: LrPosition) -> float:
    """A straight line from the end of the warm-up to the end of the course."""
    return 1 - at.progress_since(at.warmup)


def wsd(at: LrPosition) -> float:
    """Warm-up, stable, decay: the peak, then a straight line over the last `optim.decay` tokens."""
    return 1 - at.progress_since(at.whole - at.decay)


def constant(_: LrPosition) -> float:
    """The peak to the end; `optim.final_lr` means nothing."""
    return 1.0


SHAPES: dict[str, LrShape] = {
    "cosine": LrShape(cosine),
    "linear": LrShape(linear),
    "wsd": LrShape(wsd, uses_decay=True),
    "constant": LrShape(constant),
}
