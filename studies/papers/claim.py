"""A paper's claim as data: its text, the rule of agreement, the runs it needs, and the function that judges it.

A claim is judged from stored results alone, by the judge of all studies (studies/judge.py), and waits while runs are
missing. `written` says what was known of the results when its rule was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SEED, SweepRun
from studies.judge import Said, Seeds, Verdict
from studies.papers.columns import Column
from studies.results import Result
from studies.study import Measured


class Written(Enum):
    """Results that were known when a claim's rule was written; the judge itself is younger than all results."""

    BEFORE = "what is compared was written before its runs, and how it is tested with their results known"
    PARTLY = "what is compared was written with one seed known, and how it is tested with all results known"
    KNOWN = "written with its results known"
    TIMED = "written before it was measured"


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class OnGpu:
    """Runs that test the claim at a size of the paper's: a sweep of studies/sweeps, each run on one H100.

    only: variants or runs that are read; the runs that they start from are trained too
    smaller: settings that make the runs shorter than the paper's, but long enough for the claim
    column: reads a run for the page's third column; with `every`, all of its stored checkpoints
    reads: without a column, the arguments of `hybridtron evaluate RUN`
    hours: expected time of each run, if benchmarks/rehearse.jsonl does not have its recipe
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
    """A claim of a paper, with its runs and its rule.

    `needs` maps sweeps to variants; `timed` names a measurement of speed. `seen_at` says at which size the claim could
    be tested, and at which cost. If the claim does not agree, `reason` reports a further experiment with the variants
    of `further`, which do not enter the judgement. `timed_models` are recipes of the paper's size that are timed on a
    GPU.
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
    written: Written = Written.BEFORE


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Kept:
    """All stored results: runs by sweep, and measurements of speed."""

    measured: Measured
    timed: Mapping[str, Mapping[str, Any]]

    def results(self, part: str, variant: str) -> list[Result]:
        """Return the results of a variant, one for each measured seed."""
        return [result for run, result in self.measured.get(part, ()) if run.variant == variant]

    def found(self, part: str, variant: str) -> list[Any]:
        return [result.measured for result in self.results(part, variant)]

    def by_seed(self, part: str, variant: str, value: Callable[[Any], float]) -> Seeds:
        """Return a value of each measured seed of a variant."""
        pairs = self.measured.get(part, ())
        return {run.values[SEED]: value(result.measured) for run, result in pairs if run.variant == variant}

    def first(self, part: str, variant: str) -> Any:
        """Return the measured values of the first seed, or None."""
        return next(iter(self.found(part, variant)), None)

    def of(self, needs: Mapping[str, tuple[str, ...]]) -> list[tuple[SweepRun, Result]]:
        """Return the runs of the needed variants with their results."""
        return [
            pair for part, names in needs.items() for pair in self.measured.get(part, ()) if pair[0].variant in names
        ]

    def missing(self, needs: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Name the variants that have no result."""
        return [f"{part}: {name}" for part, names in needs.items() for name in names if not self.results(part, name)]


def judged(claim: Claim, kept: Kept) -> Verdict:
    """Judge a claim by its own rule; it waits while results are missing."""
    if missing := [*kept.missing(claim.needs), *({claim.timed} - {"", *kept.timed})]:
        return Verdict(Said.WAITS, f"no result yet of {', '.join(missing)}")
    return claim.judge(kept)


def unseen(why: str) -> Callable[[Kept], Verdict]:
    """Return the judge for a claim that models of a laptop's size cannot test."""
    return lambda kept: Verdict(Said.UNSEEN, why)


EMPTY = Table((), ())


def nothing(kept: Kept) -> Table:
    """Return an empty table, for claims without a table of ours."""
    return EMPTY


def minutes(pairs: Iterable[tuple[SweepRun, Result]]) -> float:
    """Return the summed minutes of the runs' steps."""
    return sum(result.minutes for _, result in pairs)


def variants(claims: Iterable[Claim], further: bool) -> dict[str, set[str]]:
    """Return the variants that claims need, by sweep, with their further experiments on request."""
    by_sweep: dict[str, set[str]] = {}
    for claim in claims:
        for part, names in claim.needs.items():
            by_sweep.setdefault(part, set()).update(names)
        if further:
            for part, names in claim.further.items():
                by_sweep.setdefault(part, set()).update(names)
    return by_sweep
