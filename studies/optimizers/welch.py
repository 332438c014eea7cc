"""Welch's t-test: do two samples with their own variances have different means?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

INTERVALS = 1000  # intervals of Simpson's rule


@dataclass(frozen=True)
class Comparison:
    """The mean of one sample minus that of another.

    `error` is the standard error, `freedom` the degrees of freedom, and `p` the two-sided probability of a difference
    at least as large if the means are equal.
    """

    difference: float
    error: float
    freedom: float
    p: float


def compared(left: Sequence[float], right: Sequence[float]) -> Comparison:
    """Compare the means of two samples, each with at least two values that are not all equal."""
    of_left = statistics.variance(left) / len(left)
    of_right = statistics.variance(right) / len(right)
    difference = statistics.mean(left) - statistics.mean(right)
    error = math.sqrt(of_left + of_right)
    freedom = (of_left + of_right) ** 2 / (of_left**2 / (len(left) - 1) + of_right**2 / (len(right) - 1))
    return Comparison(difference, error, freedom, two_sided(difference / error, freedom))


def two_sided(t: float, freedom: float) -> float:
    """Return the probability that a variable with Student's distribution is at least as far from zero as `t`.

    With x = sqrt(freedom) tan(angle), the density is proportional to cos(angle)^(freedom - 1).
    """

    def density(angle: float) -> float:
        return math.cos(angle) ** (freedom - 1)

    end = math.atan(abs(t) / math.sqrt(freedom))
    width = end / INTERVALS
    odd = sum(density(place * width) for place in range(1, INTERVALS, 2))
    even = sum(density(place * width) for place in range(2, INTERVALS, 2))
    inside = (density(0.0) + 4 * odd + 2 * even + density(end)) * width / 3
    log_half = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    return 1 - inside / (math.sqrt(math.pi) / 2 * math.exp(log_half))
