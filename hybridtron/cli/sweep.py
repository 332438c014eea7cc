"""Run a grid of training runs, and write one table and one picture with their results.

    hybridtron sweep examples/sweep/window.yaml
    hybridtron sweep examples/sweep/window.yaml --plan     list the runs, and start none
    hybridtron sweep examples/sweep/window.yaml --slurm cluster=h100_infiniband     array jobs, one GPU for each run

docs/sweeps.md describes the YAML file. By default two runs train at a time. The sweep's folder is runs/sweeps/NAME, if
the file is NAME.yaml. The folder contains a folder for each run, and the results table.md, runs.jsonl and picture.png.
A repeated command continues the sweep: finished runs stay unchanged, interrupted runs resume, and runs that are new in
the file start. With --slurm the runs are queued as jobs. With --slurm --plan the job scripts are only printed.

Exit codes: 0 all runs have finished or are queued, 1 a run has failed, 2 a wrong file or configuration, 75 the sweep
was interrupted and its runs have saved checkpoints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hybridtron.cli.arguments import positive
from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.evaluate.pictures import picture
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, Unusable
from hybridtron.progress import progress_bar
from hybridtron.requirements import is_there
from hybridtron.sweep import results
from hybridtron.sweep.carry_out import EndedRun, Folder, carry_out, share_cores
from hybridtron.sweep.grid import SEED, Sweep, narrow, read
from hybridtron.train.jsonl import write_whole
from hybridtron.train.outcome import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = 3  # the x axis is logarithmic if its largest value is at least TIMES its smallest value
INTERRUPTED = 75  # exit code of an interrupted sweep


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(prog="hybridtron sweep", description="A grid of training runs on this machine.")
    parser.add_argument("file", type=path_of, help="YAML file that describes the runs (docs/sweeps.md)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="further settings for every run")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only this variant or run, with the runs whose weights it needs"
    )
    parser.add_argument("--output", type=path_of, metavar="DIR", help="the sweep's folder (default: runs/sweeps/FILE)")
    parser.add_argument(
        "--jobs", type=positive, default=2, metavar="N", help="runs that train at the same time (default: %(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="list the runs, and start none")
    parser.add_argument("--slurm", action="store_true", help="queue the runs as array jobs, one GPU each")
    parser.add_argument("--then", metavar="COMMAND", help="with --slurm: a command to run when all runs have ended")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Run a sweep's remaining runs and report the results. Returns the exit code."""
    chosen = parse(arguments)
    sweep = narrow(read(chosen.file, chosen.settings), chosen.only)
    folder = Folder(chosen.output or Path("runs/sweeps") / chosen.file.stem)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if chosen.slurm:
        return submit_array(sweep, folder, chosen.plan, chosen.then)
    steps = steps_of(sweep, folder)
    if chosen.plan:
        for run in sweep.runs:
            if folder.is_finished(run.name):
                about = "finished"
            else:
                about = f"at step {folder.step(run.name)}"
            console.print(
                f"{run.name}: {about} of {steps[run.name] or 'unknown, until the run it starts from has finished'}"
            )
        return 0
    try:
        faults = [ended.fault for ended in carried(sweep, folder, chosen.jobs, steps, console)]
    except KeyboardInterrupt:
        console.print("interrupted: the runs have saved checkpoints; repeat the command to continue")
        return INTERRUPTED
    report(sweep, folder, console)
    return 1 if any(faults) else 0


def carried(
    sweep: Sweep, folder: Folder, jobs: int, steps: dict[str, int], console: Console
) -> Generator[EndedRun, None, None]:
    """Train the remaining runs. Print a line for each run that ends, and yield the ended run.

    If the generator is closed early, the runs in training are asked to save and stop.
    """
    folder.record(sweep)
    share_cores(jobs)
    for number, ended in enumerate(_run_with_bar(sweep, folder, jobs, steps), 1):
        took = f"{number} ended, {ended.run.name} after {clock(ended.seconds)}"
        console.print(f"FAILED {took}: {ended.fault}" if ended.fault else took)
        yield ended


def submit_array(sweep: Sweep, folder: Folder, plan: bool, then: str | None) -> int:
    """Submit the remaining runs as SLURM array jobs. Returns the exit code.

    With `plan` the job scripts are only printed. `then` is a command to queue after the runs, or None.
    """
    from hybridtron.cluster import array

    plans = plans_of(sweep, folder)
    config = plans[sweep.runs[0].name].config
    jobs = [*array.arrays_of(sweep, folder, config), *([array.last_of(folder, config, then)] if then else [])]
    if plan:
        print("\n".join(map(array.script, jobs)), end="")
        return 0
    array.require(sweep, jobs, plans)
    numbers = array.submit(sweep, folder, jobs)
    print(f"submitted as job {', '.join(numbers)}" if numbers else "all runs have finished")
    return 0


def steps_of(sweep: Sweep, folder: Folder) -> dict[str, int]:
    """Return each run's last step, or 0 if the run starts from the weights of an unfinished run.

    Raises Unusable if a run's configuration can't run.
    """
    plans = plans_of(sweep, folder)
    return {run.name: plans[run.name].last_step if run.name in plans else 0 for run in sweep.runs}


def plans_of(sweep: Sweep, folder: Folder) -> dict[str, RunPlan]:
    """Return the runs' plans, by name. Raises Unusable if a run's configuration can't run.

    Runs that start from the weights of an unfinished run are left out, since their configuration depends on the
    unfinished run's checkpoint.
    """
    plans = {}
    for run in sweep.runs:
        if run.start is None or folder.is_finished(run.start):
            try:
                plans[run.name] = RunPlan.of(load(folder.settings(run)))
                require(plans[run.name])
            except Unusable as error:
                raise Unusable(f"{run.name}: {error}", code=error.code) from error
    return plans


def _run_with_bar(sweep: Sweep, folder: Folder, jobs: int, steps: dict[str, int]) -> Iterator[EndedRun]:
    """Train the remaining runs, and show a progress bar over the steps of all runs. Yields each run that ends."""
    longest = max(steps.values())
    total_steps = sum(steps[run.name] or longest for run in sweep.runs)
    with progress_bar("steps") as report_progress:
        reached = {run.name: folder.step(run.name) for run in sweep.runs}

        def watch(running: Collection[str]) -> None:
            reached.update((name, folder.step(name)) for name in running)
            report_progress(sum(reached.values()), total_steps)

        yield from carry_out(sweep, folder, jobs, watch)


def report(sweep: Sweep, folder: Folder, console: Console) -> None:
    """Print the results table, and write the files table.md, runs.jsonl and picture.png.

    runs.jsonl has each run's metrics. The picture is left out without matplotlib.
    """
    points = results.points(sweep, folder)
    rows = [results.cells(sweep, point) for point in points]
    header = results.header(sweep)
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    page = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    if SEED in sweep.axes:
        note = f"Mean ± standard error over the values of `{SEED}`."
    else:
        note = ""
    write_whole(folder.path / "table.md", "\n".join([f"# {folder.path.name}", "", *page, "", note]).strip() + "\n")
    write_whole(folder.path / "runs.jsonl", "".join(json.dumps(x) + "\n" for x in results.lines(sweep, folder)))
    file_names = ["table.md", "runs.jsonl"]
    shown = [point for point in points if sweep.metrics[0] in point.metrics]
    if shown and is_there("matplotlib"):
        draw(sweep, shown, folder.path / "picture.png")
        file_names.append("picture.png")
    console.print(f"{folder.path}: {', '.join(file_names)}")


def draw(sweep: Sweep, shown: Sequence[results.Point], output: Path) -> None:
    """Plot the first metric over a key: the grid's first key with only numeric values.

    There is a curve for each combination of the other keys' values. If the grid has no such key, the x axis lists the
    points' names.
    """
    metric = sweep.metrics[0]
    along = next((key for key in sweep.axes if key != SEED and all(_is_number(p.values[key]) for p in shown)), None)
    with picture(output) as axes:
        for label, points in _curves(shown, along).items():
            values = [point.metrics[metric] for point in points]
            if along is None:
                positions = list(range(len(points)))
            else:
                positions = [float(point.values[along]) for point in points]
            errors = [value.error or 0.0 for value in values]
            axes.errorbar(
                positions, [value.mean for value in values], errors, marker="o", capsize=3, label=label or metric
            )
        axes.set(title=output.parent.name, xlabel=along or "", ylabel=metric)
        if along is not None:
            set_ticks(axes, {point.values[along]: float(point.values[along]) for point in shown})
        else:
            names = [" ".join([point.variant, *point.values.values()]).strip() for point in shown]
            axes.set_xticks(range(len(shown)), names, rotation=30, ha="right")


def set_ticks(axes: Axes, positions: dict[str, float]) -> None:
    """Label the x axis at the grid's values.

    The axis is logarithmic if all values are positive and the largest value is at least TIMES the smallest value, as is
    usual for learning rates.
    """
    smallest = min(positions.values())
    largest = max(positions.values())
    if smallest > 0 and largest >= TIMES * smallest:
        axes.set_xscale("log")
    axes.set_xticks(list(positions.values()), list(positions))
    axes.minorticks_off()


def _curves(shown: Sequence[results.Point], along: str | None) -> dict[str, list[results.Point]]:
    """Return a mapping from each curve's label to its points, sorted by the key `along`.

    `along` is the key of the x axis. If it is None, the points are not sorted.
    """
    curves: dict[str, list[results.Point]] = {}
    for point in shown:
        settings = [f"{key}={value}" for key, value in point.values.items() if key != along]
        if along is None:
            label = ""
        else:
            label = " ".join([point.variant] * bool(point.variant) + settings)
        curves.setdefault(label, []).append(point)
    if along is not None:
        sort: Callable[[results.Point], float] = lambda point: float(point.values[along])  # noqa: E731
        curves = {label: sorted(points, key=sort) for label, points in curves.items()}
    return curves


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
