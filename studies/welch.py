"""Welch's t-test: do two samples with their own variances have different means? And Student's, for a single sample."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

INTERVALS = 100  # intervals of Simpson's rule
HALVINGS = 45  # halvings of the range in which a quantile is searched
WIDEST = 1e6  # no quantile of the studies is larger


@dataclass(frozen=True)
class Difference:
    """A mean difference, with its standard error and the degrees of freedom of the error."""

    mean: float
    error: float
    freedom: float

    def p(self, bound: float = 0.0) -> float:
        """Return the two-sided probability of a mean at least as far from `bound` if the true difference is `bound`."""
        if self.error == 0:
            return float(self.mean == bound)
        return two_sided((self.mean - bound) / self.error, self.freedom)

    def interval(self, level: float) -> tuple[float, float]:
        """Return the bounds with a probability `p` of `level`: the interval of confidence 1 - level."""
        reach = quantile(level, self.freedom) * self.error
        return self.mean - reach, self.mean + reach


def of_two(left: Sequence[float], right: Sequence[float]) -> Difference:
    """Return the mean of `left` minus that of `right`, each with at least two values, as Welch has it."""
    of_left = variance(left) / len(left)
    of_right = variance(right) / len(right)
    both = of_left + of_right
    freedom = float(len(left) + len(right) - 2)
    if both > 0:
        freedom = both**2 / (of_left**2 / (len(left) - 1) + of_right**2 / (len(right) - 1))
    return Difference(statistics.fmean(left) - statistics.fmean(right), math.sqrt(both), freedom)


def of_one(values: Sequence[float]) -> Difference:
    """Return the mean of at least two values, as Student has it."""
    return Difference(statistics.fmean(values), math.sqrt(variance(values) / len(values)), len(values) - 1)


def variance(values: Sequence[float]) -> float:
    """Return the sample variance; 100 times as fast as that of `statistics`, which computes with fractions."""
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


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


def quantile(level: float, freedom: float) -> float:
    """Return the `t` whose two-sided probability is `level`."""
    low = 0.0
    high = WIDEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if two_sided(middle, freedom) > level:
            low = middle
        else:
            high = middle
    return high
