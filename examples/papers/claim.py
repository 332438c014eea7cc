"""A claim of a paper as data: what it says, what would count as agreement, the runs it needs, and how it is judged.

`agreement` was written down before the runs. A claim is judged from kept results alone, and what says nothing about it
is said to say nothing: where runs are missing it waits, and where a difference is below two standard errors it is
undecided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from examples.papers.columns import Column
from examples.results import Result
from examples.study import Measured
from hybridtron.sweep.grid import SweepRun

ERRORS = 2.0  # standard errors, below which a difference is undecided


class Said(Enum):
    """What our results say of a claim."""

    AGREES = "agrees"
    NOT = "does not agree"
    UNDECIDED = "undecided"
    UNSEEN = "cannot be seen at this size"
    WAITS = "waits for runs"


@dataclass(frozen=True)
class Verdict:
    said: Said
    numbers: str


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class OnGpu:
    """What shows the claim at a size of the paper's: runs of a sweep of examples/sweep, each on one H100.

    only: its variants or runs that are read; what they start from is trained with them
    smaller: settings that make the sweep's runs shorter than the paper's, and no shorter than the claim needs
    column: how a run is read for the page's third column; `every` reads all checkpoints that it has kept
    reads: where there is no column, what `hybridtron evaluate RUN` is asked
    hours: of each run as its rehearsal expects, where that is not among those of benchmarks/rehearse.jsonl
    """

    sweep: str
    only: tuple[str, ...]
    smaller: tuple[str, ...] = ()
    column: Column | None = None
    every: bool = False
    reads: str = ""
    hours: float | None = None


@dataclass(frozen=True)
class Claim:
    """`needs` are variants by the name of their sweep, `timed` is what is measured of speed.

    `seen_at` says where it could be seen, and what that costs. Where claim and results disagree, `reason` says what a
    further experiment found, whose variants are `further`: a claim is judged without them. `timed_models` are recipes
    of the paper's size, which are timed on a GPU.
    """

    name: str
    where: str
    says: str
    paper: Table
    agreement: str
    needs: Mapping[str, tuple[str, ...]]
    ours: Callable[[Kept], Table]
    judge: Callable[[Kept], Verdict]
    draw: Callable[[Kept, Path], None] | None = None
    seen_at: str = ""
    reason: Callable[[Kept], str] | None = None
    further: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    timed: str = ""
    timed_models: tuple[str, ...] = ()
    on_gpu: OnGpu | None = None


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Kept:
    """The results that there are: of runs by the name of the sweep, and of speed."""

    measured: Measured
    timed: Mapping[str, Mapping[str, Any]]

    def results(self, part: str, variant: str) -> list[Result]:
        """Of every seed that has been measured."""
        return [result for run, result in self.measured.get(part, ()) if run.variant == variant]

    def found(self, part: str, variant: str) -> list[Any]:
        return [result.found for result in self.results(part, variant)]

    def first(self, part: str, variant: str) -> Any:
        """What was found with the first seed."""
        return next(iter(self.found(part, variant)), None)

    def of(self, needs: Mapping[str, tuple[str, ...]]) -> list[tuple[SweepRun, Result]]:
        """All results that a claim is made from."""
        return [
            pair for part, names in needs.items() for pair in self.measured.get(part, ()) if pair[0].variant in names
        ]

    def missing(self, needs: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Variants without any result."""
        return [f"{part}: {name}" for part, names in needs.items() for name in names if not self.results(part, name)]


def judged(claim: Claim, kept: Kept) -> Verdict:
    """By its own rule, where nothing is missing."""
    if missing := [*kept.missing(claim.needs), *({claim.timed} - {"", *kept.timed})]:
        return Verdict(Said.WAITS, f"no result yet of {', '.join(missing)}")
    return claim.judge(kept)


def unseen(why: str) -> Callable[[Kept], Verdict]:
    """The judge of a claim that no run of a laptop's size can say anything about."""
    return lambda kept: Verdict(Said.UNSEEN, why)


EMPTY = Table((), ())


def nothing(kept: Kept) -> Table:
    """Where there is no table of ours."""
    return EMPTY


@dataclass(frozen=True)
class Pair:
    """That `less` is below `more`, of two groups of values, one for each seed."""

    name: str
    less: Sequence[float]
    more: Sequence[float]


def in_order(pairs: Iterable[Pair], deviation: float | None) -> Verdict:
    """Agrees where every pair lies so by two standard errors; does not where one lies the other way by as much.

    `deviation` is that of one run over seeds, the same for all; None where no model has a second seed yet.
    """
    said = [(pair, _lies(pair, deviation)) for pair in pairs]
    numbers = "; ".join(f"{pair.name}: {_compared(pair)} ({outcome.value})" for pair, outcome in said)
    outcomes = [outcome for _, outcome in said]
    whole = next((one for one in (Said.NOT, Said.UNDECIDED) if one in outcomes), Said.AGREES)
    return Verdict(whole, numbers if deviation else f"{numbers}; without a second seed no deviation is known")


def _lies(pair: Pair, deviation: float | None) -> Said:
    if deviation is None:
        return Said.UNDECIDED
    difference = statistics.mean(pair.more) - statistics.mean(pair.less)
    error = deviation * math.sqrt(1 / len(pair.less) + 1 / len(pair.more))
    if abs(difference) < ERRORS * error:
        return Said.UNDECIDED
    return Said.AGREES if difference > 0 else Said.NOT


def _compared(pair: Pair) -> str:
    less = statistics.mean(pair.less)
    more = statistics.mean(pair.more)
    return f"{less:.4g} {'<' if less < more else '>='} {more:.4g}"


def pooled(groups: Iterable[Sequence[float]]) -> float | None:
    """The deviation over seeds, of all groups that have several together; None where there is none."""
    several = [group for group in groups if len(group) > 1]
    if not several:
        return None
    freedom = sum(len(group) - 1 for group in several)
    return math.sqrt(sum((len(group) - 1) * statistics.variance(group) for group in several) / freedom)


def holds(checks: Iterable[tuple[str, bool]]) -> Verdict:
    """Agrees where all of these hold, which are not about the difference of two models."""
    checked = list(checks)
    numbers = "; ".join(text if kept else f"{text} **(does not hold)**" for text, kept in checked)
    return Verdict(Said.AGREES if all(kept for _, kept in checked) else Said.NOT, numbers)


def minutes(pairs: Iterable[tuple[SweepRun, Result]]) -> float:
    """That the runs took."""
    return sum(result.minutes for _, result in pairs)


def variants(claims: Iterable[Claim], further: bool) -> dict[str, set[str]]:
    """What claims need together, and their further experiments where asked for, by the name of the sweep."""
    found: dict[str, set[str]] = {}
    for claim in claims:
        for part, names in (*claim.needs.items(), *(claim.further.items() if further else ())):
            found.setdefault(part, set()).update(names)
    return found
