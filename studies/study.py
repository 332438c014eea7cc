"""The common part of the studies: train the runs of sweeps, measure each run once, and write a page.

Runs are trained seed by seed and measured as soon as they end, so a stopped study keeps its results: finished runs are
not trained again, and measured runs are not measured again.

Exit codes: 0 written; 1 a run failed; 2 a wrong argument, or the folder holds runs with other settings; 75 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridtron.architecture.attention import ReadingAttention
from hybridtron.cli.arguments import positive
from hybridtron.cli.sweep import INTERRUPTED, carried, steps_of
from hybridtron.problems import Unusable
from hybridtron.requirements import demand
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import SEED, Sweep, SweepRun, read
from studies.results import ROOT, Part, Result, Results, commit

Plan = Mapping[str, Part]
"""The parts of a study by the name of their sweep."""
Measured = Mapping[str, Sequence[tuple[SweepRun, Result]]]
"""The measured runs and their results, by the name of the sweep."""
Write = Callable[[Measured, list[str], Path], None]
"""Writes page and pictures into a folder; the list holds further notes for the page."""


def parse(about: str, name: str, arguments: list[str]) -> argparse.Namespace:
    """Parse a study's command line; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes only where --output says")
    parser.add_argument("--runs", type=Path, metavar="DIR", help=f"where the runs stand (default: runs/{name})")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"of page and pictures (default: studies/{name})")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="train nothing: a page of what has finished")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep results here, and use those that are")
    chosen = parser.parse_args(arguments)
    if chosen.quick and (chosen.runs is None or chosen.output is None):
        parser.error("--quick needs --runs and --output, so that it leaves the real study's alone")
    chosen.data = ROOT / "data" / name
    if chosen.quick:
        chosen.data = chosen.runs / "data"
    chosen.runs = chosen.runs or ROOT / "runs" / name
    chosen.output = chosen.output or ROOT / "studies" / name
    return chosen


def conduct(chosen: argparse.Namespace, planned: Callable[[], Plan], write: Write) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    import torch

    demand("plot")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    results = Results(chosen.results)
    try:
        plan = planned()
        earlier = found_in(plan, results)
        for name, part, runs in seed_by_seed(plan):
            if not chosen.measure and not trained(name, part, runs, results=results, jobs=chosen.jobs, console=console):
                return 1
            measure(name, part, runs, results=results, console=console)
        finished = found_in(plan, results)
        if not any(finished.values()):
            raise Unusable(f"{chosen.runs}: no run has finished", code="no-file")
        chosen.output.mkdir(parents=True, exist_ok=True)
        write(finished, state(plan, finished) + taken(chosen.results, earlier), chosen.output)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"written to {chosen.output}")
    return 0


def selected(file: Path, folder: Path, more: Callable[[SweepRun], tuple[str, ...] | None]) -> tuple[Sweep, Folder]:
    """Read a sweep file and add further settings to each of its runs.

    Runs for which `more` returns None are left out.
    """
    sweep = read(file)
    added = [(run, more(run)) for run in sweep.runs]
    chosen = (replace(run, settings=(*run.settings, *of_run)) for run, of_run in added if of_run is not None)
    return replace(sweep, runs=tuple(chosen)), Folder(folder)


def seed_by_seed(plan: Plan) -> Iterator[tuple[str, Part, list[SweepRun]]]:
    """Yield the runs of all parts in training order: everything for one seed, then for the next.

    A study that is stopped thus has complete seeds.
    """
    for seed in dict.fromkeys(run.values[SEED] for part in plan.values() for run in part.sweep.runs):
        for name, part in plan.items():
            yield name, part, [run for run in part.sweep.runs if run.values[SEED] == seed]


def trained(name: str, part: Part, runs: Sequence[SweepRun], *, results: Results, jobs: int, console: Console) -> bool:
    """Train the runs without a result, with their starting points; measure each as it ends.

    Returns False if a run failed.
    """
    missing = [run for run in runs if results.of(name, part, run) is None]
    sweep = replace(part.sweep, runs=tuple(with_starts(missing, runs, part.folder)))
    if not missing:
        return True
    well = True
    with closing(carried(sweep, part.folder, jobs, steps_of(sweep, part.folder), console)) as every:
        for ended in every:
            well &= not ended.fault
            measure(name, part, [ended.run], results=results, console=console)
    return well


def with_starts(missing: Sequence[SweepRun], runs: Sequence[SweepRun], folder: Folder) -> list[SweepRun]:
    """Return the missing runs and the unfinished runs that they start from, in the order of `runs`."""
    by_name = {run.name: run for run in runs}
    needed: set[str] = set()
    for run in missing:
        start: str | None = run.name
        while start is not None and start not in needed:
            needed.add(start)
            if folder.is_finished(start):
                break
            start = by_name[start].start
    return [run for run in runs if run.name in needed]


def measure(name: str, part: Part, runs: Sequence[SweepRun], *, results: Results, console: Console) -> None:
    """Measure the finished runs that have no result yet."""
    for run in runs:
        if part.folder.is_finished(run.name) and results.of(name, part, run) is None:
            results.measure(name, part, run)
            console.print(f"measured {run.name}")


def found_in(plan: Plan, results: Results) -> Measured:
    """Return the results measured so far, by sweep."""
    return {
        name: [(run, result) for run in part.sweep.runs if (result := results.of(name, part, run)) is not None]
        for name, part in plan.items()
    }


def state(plan: Plan, found: Measured) -> list[str]:
    """Return notes for the page: the code's commit, and for each sweep the runs that have not finished."""
    notes = [f"written at commit {commit()}"]
    for name, part in plan.items():
        measured = {run.name for run, _ in found[name]}
        if left := [run.name for run in part.sweep.runs if run.name not in measured]:
            notes.append(f"not finished, and not on this page: {', '.join(left)} ({name})")
    return notes


def taken(kept: Path | None, earlier: Measured) -> list[str]:
    """Return a note for the page that counts the results found in the folder of results, by commit.

    The list is empty if there is no such folder or no such result.
    """
    commits = [result.commit for of_part in earlier.values() for _, result in of_part]
    if kept is None or not commits:
        return []
    counted = ", ".join(f"{name} ({commits.count(name)})" for name in dict.fromkeys(commits))
    return [f"results of earlier runs, by commits: {counted}"]


def answers(
    checkpoint: Path,
    asked: Mapping[str, Any],
    output: Path,
    *,
    batch: int = 16,
    attention: ReadingAttention | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of `hybridtron evaluate` for a file of tasks.

    Samples that `output` already records are not evaluated again.
    """
    from hybridtron.evaluate.evaluation import EvalRequest, evaluate
    from hybridtron.evaluate.loaded_model import load_model

    with load_model(checkpoint, attention=attention) as model:
        return list(evaluate(model, output.name, EvalRequest(asked, False, batch=batch), output, unshown).rows)


@contextmanager
def unshown(_: str) -> Iterator[Callable[[int, int], None]]:
    """Provide a progress callback that shows no bar, as the bar of the steps is already shown."""
    yield lambda done, of: None
