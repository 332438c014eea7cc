"""What the studies of this folder share: sweeps that are carried out, runs that are measured once, a page at the end.

A study that was stopped continues: what has finished is not trained again, what is measured is not measured again.
Exit codes: 0 written, 1 a run failed, 2 a wrong argument, or runs of other settings stand in the folder, 75 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridtron.cli.given import positive, progress_bar
from hybridtron.cli.sweep import INTERRUPTED, carried, steps_of
from hybridtron.problems import Unusable
from hybridtron.requirements import demand
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep, SweepRun, read
from hybridtron.train.records import read_record, write_whole

ROOT = Path(__file__).resolve().parents[1]
Plan = Mapping[str, tuple[Sweep, Folder]]
"""By the name of a sweep: its runs, and their folder."""
Write = Callable[[Plan, list[str], Path], None]
"""Measures the runs that have finished, and writes page and pictures; notes say what else there is to know."""


def parse(about: str, name: str, arguments: list[str]) -> argparse.Namespace:
    """The command line of a study; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes only where --output says")
    parser.add_argument("--runs", type=Path, metavar="DIR", help=f"where the runs stand (default: runs/{name})")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of page and pictures (default: benchmarks)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="train nothing: a page of what has finished")
    chosen = parser.parse_args(arguments)
    if chosen.quick and (chosen.runs is None or chosen.output is None):
        parser.error("--quick needs --runs and --output, so that it leaves the real study's alone")
    chosen.runs = chosen.runs or ROOT / "runs" / name
    chosen.output = chosen.output or ROOT / "benchmarks"
    return chosen


def conduct(chosen: argparse.Namespace, planned: Callable[[], Plan], write: Write) -> int:
    """Train what is missing, measure, and write. Returns the exit code."""
    demand("plot")
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        plan = planned()
        for sweep, folder in () if chosen.measure else plan.values():
            if not carried(sweep, folder, chosen.jobs, steps_of(sweep, folder), console):
                return 1
        chosen.output.mkdir(parents=True, exist_ok=True)
        write({part: finished(*one) for part, one in plan.items()}, state(plan), chosen.output)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"written to {chosen.output}")
    return 0


def selected(file: Path, folder: Path, more: Callable[[SweepRun], tuple[str, ...] | None]) -> tuple[Sweep, Folder]:
    """The runs of a sweep's file, each with further settings; those that get None are left out."""
    sweep = read(file)
    added = [(run, more(run)) for run in sweep.runs]
    chosen = (replace(run, settings=(*run.settings, *of_run)) for run, of_run in added if of_run is not None)
    return replace(sweep, runs=tuple(chosen)), Folder(folder)


def finished(sweep: Sweep, folder: Folder) -> tuple[Sweep, Folder]:
    """What there is to measure. Unusable where nothing has finished."""
    runs = tuple(run for run in sweep.runs if folder.is_finished(run.name))
    if not runs:
        raise Unusable(f"{folder.path}: no run has finished")
    return replace(sweep, runs=runs), folder


def state(plan: Plan) -> list[str]:
    """Notes for the page: the code that wrote it, and of each sweep the runs that have not finished."""
    left = {
        part: [run.name for run in sweep.runs if not of.is_finished(run.name)] for part, (sweep, of) in plan.items()
    }
    code = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    notes = [f"written at commit {code.stdout.strip() or 'unknown'}"]
    notes += [
        f"not finished, and not on this page: {', '.join(names)} ({part})" for part, names in left.items() if names
    ]
    return notes


def measured(folder: Folder, run: SweepRun, measure: Callable[[Path], Any]) -> Any:
    """What is found on a run that has finished; it is measured once."""
    path = folder.of(run.name) / "measured.json"
    if not (found := read_record(path)):
        found = {"found": measure(folder.of(run.name))}
        write_whole(path, json.dumps(found))
    return found["found"]


def answers(checkpoint: Path, asked: Mapping[str, Any], output: Path, batch: int = 16) -> list[dict[str, Any]]:
    """The rows of `hybridtron evaluate` with a file of tasks; sample by sample, what is recorded is not asked again."""
    from hybridtron.evaluate.run import Wishes, evaluate
    from hybridtron.evaluate.served import served

    with served(checkpoint) as model:
        return list(evaluate(model, output.name, Wishes(asked, False, batch=batch), output, progress_bar).rows)
