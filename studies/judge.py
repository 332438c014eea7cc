"""The judge of all studies: decides a claim from measured values, one for each seed.

A claim has a difference of means in a range, such as above 0. The claim agrees if the 95% interval of the difference
lies inside the range, does not agree if it lies outside, and is undecided otherwise. The interval is Welch's for two
models that were trained by themselves. For models of one start (tuned from the same checkpoint of a seed) it is
Student's, over the differences by seed. Timings have no seeds, and are judged by their ratios alone.

Below three seeds on a side nothing is decided: two values that happen to lie close together would decide everything.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from studies.welch import Difference, of_one, of_two

LEVEL = 0.05
SEEDS = 3  # fewer values on a side decide nothing
WRITTEN = "2026-11-27"
DRAWS = 2000
POWER_SEEDS = (3, 4, 5, 7, 10)
POWER_AT = 2.0  # true difference, in deviations over seeds
Seeds = Mapping[str, float]
"""A model's measured values by seed."""


class Said(Enum):
    """The outcome of a claim, by our results."""

    AGREES = "agrees"
    NOT = "does not agree"
    UNDECIDED = "undecided"
    ONE_SEED = "one seed"
    FEW_SEEDS = "too few seeds"
    NO_FAILURE = "does not fail at this size"
    OTHER = "another measure"
    UNSEEN = "cannot be seen at this size"
    WAITS = "waits for runs"


@dataclass(frozen=True)
class Verdict:
    said: Said
    numbers: str


@dataclass(frozen=True)
class Check:
    """A difference of means, and the range (`low`, `high`) in which a claim has it.

    values: the compared means as text
    seeds: values of the side with fewer
    difference: None if there are too few seeds
    ratio: means that the values are logarithms, whose differences are printed as ratios
    """

    name: str
    values: str
    seeds: int
    difference: Difference | None
    low: float = -math.inf
    high: float = math.inf
    ratio: bool = False

    def said(self, level: float = LEVEL) -> Said:
        """Return the outcome; it contradicts the claim only if the probability is below `level`."""
        if self.difference is None:
            return _FEW[self.seeds]
        mean = self.difference.mean
        by_bound = {bound: self.difference.p(bound) for bound in (self.low, self.high) if math.isfinite(bound)}
        if self.low < mean < self.high and max(by_bound.values()) < LEVEL:
            return Said.AGREES
        beyond = [p for bound, p in by_bound.items() if bound == self.low > mean or bound == self.high < mean]
        if beyond and beyond[0] < level:
            return Said.NOT
        return Said.UNDECIDED

    def text(self, level: float = LEVEL, words: Mapping[Said, str] | None = None) -> str:
        """Return the means, the difference with its interval, and the outcome, for which `words` has other words."""
        said = self.said(level)
        word = (words or {}).get(said, said.value)
        if self.difference is None:
            return f"{self.name}: {self.values} ({word})"
        numbers = (self.difference.mean, *self.difference.interval(LEVEL))
        mean, low, high = (f"{value:+.3g}" for value in numbers)
        if self.ratio:
            mean, low, high = (_shown(value, ratio=True) for value in numbers)
        return f"{self.name}: {self.values}, {mean} [{low}, {high}] ({word})"


_FEW = {0: Said.FEW_SEEDS, 1: Said.ONE_SEED, 2: Said.FEW_SEEDS}


def below(name: str, less: Seeds, more: Seeds, *, one_start: bool = False, ratio: bool = False) -> Check:
    """Return the check that the mean of `less` lies below that of `more`.

    With `one_start` the models of a seed were tuned from the same checkpoint, and are compared seed by seed.
    """
    return differing(name, less, more, low=0.0, one_start=one_start, ratio=ratio)


def differing(
    name: str,
    less: Seeds,
    more: Seeds,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    one_start: bool = False,
    ratio: bool = False,
) -> Check:
    """Return the check that the mean of `more` minus that of `less` lies in a range."""
    if one_start:
        shared = [seed for seed in less if seed in more]
        if not shared:
            return Check(name, "no seed in common", 0, None, low, high, ratio)
        less = {seed: less[seed] for seed in shared}
        more = {seed: more[seed] for seed in shared}
    seeds = min(len(less), len(more))
    difference = None
    if seeds >= SEEDS and one_start:
        difference = of_one([more[seed] - less[seed] for seed in less])
    elif seeds >= SEEDS:
        difference = of_two(list(more.values()), list(less.values()))
    means = " and ".join(_shown(statistics.fmean(of.values()), ratio=ratio) for of in (less, more))
    return Check(name, means, seeds, difference, low, high, ratio)


def within(
    name: str, values: Seeds, *, low: float = -math.inf, high: float = math.inf, ratio: bool = False, shown: str = ""
) -> Check:
    """Return the check that the mean of one model's values lies in a range; `shown` replaces the values by seed."""
    difference = None
    if len(values) >= SEEDS:
        difference = of_one(list(values.values()))
    if not shown:
        shown = ", ".join(_shown(value, ratio=ratio) for value in values.values())
    return Check(name, shown, len(values), difference, low, high, ratio)


def _shown(value: float, *, ratio: bool) -> str:
    """Format a value; a logarithm as the ratio, up to the largest float."""
    if ratio:
        value = math.exp(min(value, 700.0))
    return f"{value:.4g}"


def decided(checks: Sequence[Check]) -> Verdict:
    """Judge a claim with several checks.

    It agrees if all of them do. It does not agree if one is reversed: at 5% over all of them together, so that each
    counts at 5% divided by their number. Otherwise the seeds are too few, or it is undecided.
    """
    level = LEVEL / len(checks)
    return Verdict(outcome(checks), "; ".join(check.text(level) for check in checks))


def outcome(checks: Sequence[Check]) -> Said:
    """Return the outcome of a claim with several checks, as `decided` has it."""
    level = LEVEL / len(checks)
    outcomes = {check.said(level) for check in checks}
    return next(worst for worst in (*_BEFORE_AGREEMENT, Said.AGREES) if worst in outcomes)


_BEFORE_AGREEMENT = (Said.NOT, Said.ONE_SEED, Said.FEW_SEEDS, Said.UNDECIDED)


def if_failing(failures: Sequence[Check], checks: Sequence[Check]) -> Verdict:
    """Judge a claim about models that fail, by its checks if one of the failures is seen.

    If none of the models fails, the claim says nothing about them, and is not contradicted.
    """
    outcomes = {check.said() for check in failures}
    seen = "; ".join(check.text(words=_SO) for check in failures)
    if Said.AGREES in outcomes:
        verdict = decided(checks)
        return Verdict(verdict.said, f"{seen}; {verdict.numbers}")
    numbers = "; ".join([seen, *(check.text() for check in checks)])
    if outcomes == {Said.NOT}:
        return Verdict(Said.NO_FAILURE, numbers)
    said = next(worst for worst in _BEFORE_AGREEMENT[1:] if worst in outcomes)
    return Verdict(said, numbers)


def fails(check: Check) -> Verdict:
    """Judge the claim that a model fails: otherwise it does not fail at this size, which is no contradiction."""
    said = check.said()
    if said is Said.NOT:
        said = Said.NO_FAILURE
    return Verdict(said, check.text(words=_SO))


_SO = {Said.AGREES: "so", Said.NOT: "not so"}


def another(measure: str, checks: Sequence[Check]) -> Verdict:
    """Return the verdict on a claim whose measure is not the paper's; the checks are printed and decide nothing."""
    return Verdict(Said.OTHER, f"{measure}; {decided(checks).numbers}")


def timed(checks: Iterable[tuple[str, bool]]) -> Verdict:
    """Judge ratios of times, which have no seeds: agree if all of them hold."""
    said = Said.AGREES
    texts = []
    for text, kept in checks:
        if not kept:
            said = Said.NOT
            text = f"{text} **(does not hold)**"
        texts.append(text)
    return Verdict(said, "; ".join(texts))


def drawn(
    true: float, seeds: tuple[int, int], deviations: tuple[float, float], source: random.Random, *, one_start: bool
) -> Said:
    """Judge the claim, that one model lies below another, by values drawn with a true difference.

    With `one_start` the models of a seed share what they start from.
    """
    starts = [source.gauss(0.0, 5.0 * one_start) for _ in range(max(seeds))]
    less, more = (
        {str(seed): source.gauss(mean, deviation) + starts[seed] for seed in range(count)}
        for mean, count, deviation in zip((0.0, true), seeds, deviations, strict=True)
    )
    return outcome([below("drawn", less, more, one_start=one_start)])


@cache
def power(seeds: int, one_start: bool) -> float:
    """Return the share of drawn pairs that agree, at a true difference of two deviations over seeds.

    With `one_start` they are deviations of the differences by seed.
    """
    source = random.Random(seeds)
    scale = math.sqrt(0.5) if one_start else 1.0
    agreed = 0
    for _ in range(DRAWS):
        said = drawn(POWER_AT, (seeds, seeds), (scale, scale), source, one_start=one_start)
        agreed += said is Said.AGREES
    return agreed / DRAWS


def power_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the table of power."""
    header: tuple[str, ...] = (f"seen of differences of {POWER_AT:g} deviations, with seeds", *map(str, POWER_SEEDS))
    names = {False: "two models by themselves", True: "models of one start, seed by seed"}
    rows: list[tuple[str, ...]] = []
    for kind, name in names.items():
        rows.append((name, *(f"{power(seeds, kind):.0%}" for seeds in POWER_SEEDS)))
    return header, rows


def notes() -> list[str]:
    """Return notes for pages: how claims are judged, when that was written, and the power."""
    by_kind = [", ".join(f"{power(seeds, kind):.0%}" for seeds in POWER_SEEDS) for kind in (False, True)]
    counts = ", ".join(map(str, POWER_SEEDS))
    return [
        "the judge (studies/judge.py): in brackets the 95% interval of a difference of means or, of logarithms, of a "
        "ratio; by Welch's t-test, and for models of one start by Student's over the differences by seed. A claim "
        "agrees if all intervals lie where it has them, does not agree if one lies elsewhere (at 5% for all of its "
        f"comparisons together), and is undecided otherwise. Below {SEEDS} seeds on a side it says so: one seed, too "
        "few seeds",
        "drawn results (tests/studies/test_judge.py): where the true difference is none or opposite, a claim agrees in "
        "at most 5% of the draws, and where it is as claimed, at most 5% do not agree",
        f"the judge was written on {WRITTEN}, with all results of that day known; each rule says what was known when "
        "it was written",
        f"power: of true differences of {POWER_AT:g} deviations over seeds, {counts} seeds on each side see "
        f"{by_kind[0]}; of models of one start {by_kind[1]} ({DRAWS} draws)",
    ]
