"""Rules that many numbers of a configuration keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from hybridtron.specs.base import Problem


def at_least(least: int, values: Mapping[str, float]) -> Iterator[Problem]:
    return _unless(lambda value: value >= least, f"must be at least {least}", values)


def above_zero(values: Mapping[str, float]) -> Iterator[Problem]:
    return _unless(lambda value: 0 < value < math.inf, "must be a number above 0", values)


def _unless(fits: Callable[[float], bool], rule: str, values: Mapping[str, float]) -> Iterator[Problem]:
    for key, value in values.items():
        if not fits(value):
            yield Problem(key, f"is {value}, {rule}")


def divisors_near(whole: int, size: int) -> list[int]:
    """The largest divisor of a whole below a size, and the smallest above."""
    divisors = [d for d in range(1, min(whole, 2 * size) + 1) if whole % d == 0]
    below = [d for d in divisors if d < size][-1:]
    above = [d for d in divisors if d > size][:1]
    return below + above
