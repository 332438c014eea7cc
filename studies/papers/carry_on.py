"""One call's work: train runs without a result, in the order of the studies, as many as fit into the given minutes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from hybridtron.cli.sweep import INTERRUPTED
from hybridtron.sweep.grid import SweepRun
from studies.papers import speed
from studies.papers.claim import Claim, Kept, Table, variants
from studies.papers.studies import SPEED_MINUTES, STUDIES, Study, Where, all_kept, planned
from studies.results import Part
from studies.study import measure, seed_by_seed, trained


@dataclass(frozen=True)
class Batch:
    """Runs of one sweep and seed: those without a result (`missing`), and with them their starting points (`runs`)."""

    study: Study
    name: str
    part: Part
    runs: list[SweepRun]
    missing: list[SweepRun]

    def minutes(self, kept: Kept) -> float:
        return sum(planned(self.study, self.name, run, kept) for run in self.missing)


def carry_on(claims: Sequence[Claim], where: Where, minutes: float, *, jobs: int, console: Console) -> int:
    """Train and measure the next runs.

    Returns 0 if nothing is left, 1 if a run failed, 75 if runs remain.
    """
    kept = all_kept(where)
    ahead = list(batches(claims, where))
    of_speed = timed_minutes(claims, kept)
    left = sum(batch.minutes(kept) for batch in ahead) + of_speed
    planned_now = f"planned for what is left: {left / jobs:.0f} minutes, {jobs} runs at a time"
    console.print(f"{planned_now}; this call: {minutes:.0f}")
    began = time.monotonic()
    if of_speed:
        speed.measure_missing(where.kept("papers"), where.quick)
        minutes = minutes - of_speed
        left = left - of_speed
    for batch in ahead:
        fitting = that_fit(batch, kept, minutes * jobs)
        if fitting.missing:
            used = fitting.minutes(kept)
            well = carried_out(fitting, where, jobs, console)
            if not well:
                return 1
            minutes = minutes - used / jobs
            left = left - used
            spent = (time.monotonic() - began) / 60
            console.print(f"{spent:.0f} minutes used; planned for what is left: {left / jobs:.0f}")
        if len(fitting.missing) < len(batch.missing):
            return INTERRUPTED
    if any(batches(claims, where)):  # results can name further runs
        return INTERRUPTED
    return 0


def timed_minutes(claims: Sequence[Claim], kept: Kept) -> float:
    """Return the minutes for measuring speed; 0 if no claim needs it, or it has been measured."""
    if any(claim.timed and claim.timed not in kept.timed for claim in claims):
        return SPEED_MINUTES
    return 0.0


def batches(claims: Sequence[Claim], where: Where) -> Iterator[Batch]:
    """Yield the batches of these claims that have runs without a result."""
    return (batch for batch in needed(claims, where) if batch.missing)


def needed(claims: Sequence[Claim], where: Where) -> Iterator[Batch]:
    """Yield batches of the runs that these claims need, seed by seed for each sweep.

    The quick sizes leave out further experiments.
    """
    wanted = variants(claims, further=not where.quick)
    for study in STUDIES:
        for name, part, runs in seed_by_seed(study.plan(where)):
            starts = {run.start for run in runs if run.variant in wanted.get(name, ())}
            chosen = [run for run in runs if run.variant in wanted.get(name, ()) or run.name in starts]
            results = study.kept(where)
            yield Batch(study, name, part, chosen, [run for run in chosen if results.of(name, part, run) is None])


def minutes_by_sweep(claims: Sequence[Claim], where: Where) -> Table:
    """Return a table with the minutes planned in advance for each sweep, and the minutes used so far."""
    timed = speed.kept_in(where.kept("papers"))
    of_sweeps: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for batch in needed(claims, where):
        results = batch.study.kept(where)
        name = batch.name
        if batch.study.results not in ("papers", name):
            name = f"{batch.study.results}, {name}"
        for run in batch.runs:
            result = results.of(batch.name, batch.part, run)
            used = None
            if result is not None:
                used = result.minutes
            of_sweeps[name].append((batch.study.minutes(run.variant), used))
    minutes_each = SPEED_MINUTES / len(speed.NAMES)
    of_sweeps["speed"] = [(minutes_each, timed.get(name, {}).get("minutes")) for name in speed.NAMES]
    of_sweeps["together"] = [run for runs in of_sweeps.values() for run in runs]
    rows = ((name, *_counted(runs)) for name, runs in of_sweeps.items())
    return Table(("what is trained", "runs", "minutes planned", "minutes used"), tuple(rows))


def _counted(runs: Sequence[tuple[float, float | None]]) -> tuple[str, str, str]:
    """Return three cells: the number of measured runs, the minutes planned for all runs, and the minutes used."""
    used = [minutes for _, minutes in runs if minutes is not None]
    return f"{len(used)} of {len(runs)}", f"{sum(planned for planned, _ in runs):.0f}", f"{sum(used):.0f}"


def that_fit(batch: Batch, kept: Kept, minutes: float) -> Batch:
    """Reduce a batch to its first missing runs that fit into the minutes."""
    taken: list[SweepRun] = []
    for run in batch.missing:
        minutes -= planned(batch.study, batch.name, run, kept)
        if minutes < 0:
            break
        taken.append(run)
    names = {run.name for run in taken} | {run.start for run in taken}
    return Batch(batch.study, batch.name, batch.part, [run for run in batch.runs if run.name in names], taken)


def carried_out(batch: Batch, where: Where, jobs: int, console: Console) -> bool:
    """Prepare the data of a batch, train its runs and measure them. Returns False if a run failed."""
    batch.study.prepare(where)
    results = batch.study.kept(where)
    well = trained(batch.name, batch.part, batch.runs, results=results, jobs=jobs, console=console)
    measure(batch.name, batch.part, batch.runs, results=results, console=console)
    return well
