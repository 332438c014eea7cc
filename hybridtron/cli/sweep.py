"""Run a grid of training runs, and write one table and one picture of their results.

    hybridtron sweep examples/sweep/window.yaml
    hybridtron sweep examples/sweep/window.yaml --plan     list the runs, and start none
    hybridtron sweep examples/sweep/window.yaml --slurm cluster=h100_infiniband     as array jobs, one GPU a run

docs/sweeps.md describes the file. By default two runs train at a time, each in its own folder in runs/sweeps/NAME,
where NAME is the file's. table.md, runs.jsonl and picture.png are written next to them. The same command continues a
sweep: finished runs stay, interrupted ones resume, and runs added to the file start. With --slurm the runs are queued;
with --slurm --plan the scripts are printed.

Exit codes: 0 all runs finished, or are queued, 1 some failed, 2 a wrong file or configuration, 75 interrupted after the
runs were asked to save.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hybridtron.cli.given import positive, progress_bar
from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.resolve import last_step
from hybridtron.config.schema import Config
from hybridtron.evaluate.pictures import picture
from hybridtron.limits import path_of
from hybridtron.problems import Unusable
from hybridtron.requirements import is_there
from hybridtron.sweep import results
from hybridtron.sweep.carry_out import EndedRun, Folder, carry_out, share_cores
from hybridtron.sweep.grid import SEED, Sweep, narrowed, read
from hybridtron.train.outcome import clock
from hybridtron.train.records import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = 3  # smallest ratio of the largest to the smallest value for a logarithmic axis
INTERRUPTED = 75  # exit code


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="hybridtron sweep", description="A grid of training runs on this machine.")
    parser.add_argument("file", type=path_of, help="what the runs share, and in what they differ (docs/sweeps.md)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="behind the file's settings of every run")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a variant or run, and those that it starts from"
    )
    parser.add_argument("--output", type=path_of, metavar="DIR", help="the sweep's folder (default: runs/sweeps/FILE)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--plan", action="store_true", help="list the runs, and start none")
    parser.add_argument("--slurm", action="store_true", help="queue the runs as array jobs, one GPU each")
    parser.add_argument("--then", metavar="COMMAND", help="with --slurm: queue this, too, for when the runs have ended")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the remaining runs of a sweep and report the results. Returns the exit code."""
    chosen = parse(arguments)
    sweep = narrowed(read(chosen.file, chosen.settings), chosen.only)
    folder = Folder(chosen.output or Path("runs/sweeps") / chosen.file.stem)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if chosen.slurm:
        return queued(sweep, folder, chosen.plan, chosen.then)
    steps = steps_of(sweep, folder)
    if chosen.plan:
        for run in sweep.runs:
            if folder.is_finished(run.name):
                about = "finished"
            else:
                about = f"at step {folder.step(run.name)}"
            console.print(f"{run.name}: {about} of {steps[run.name] or 'as many as its phases say'}")
        return 0
    try:
        faults = [ended.fault for ended in carried(sweep, folder, chosen.jobs, steps, console)]
    except KeyboardInterrupt:
        console.print("interrupted: the runs have saved; the same command continues")
        return INTERRUPTED
    report(sweep, folder, console)
    return 1 if any(faults) else 0


def carried(
    sweep: Sweep, folder: Folder, jobs: int, steps: dict[str, int], console: Console
) -> Generator[EndedRun, None, None]:
    """Run the remaining runs, print a line when one ends, and yield it.

    If the generator is closed early, the other runs are asked to save and stop.
    """
    folder.record(sweep)
    share_cores(jobs)
    for number, ended in enumerate(_watched(sweep, folder, jobs, steps), 1):
        took = f"{number} ended, {ended.run.name} after {clock(ended.seconds)}"
        console.print(f"FAILED {took}: {ended.fault}" if ended.fault else took)
        yield ended


def queued(sweep: Sweep, folder: Folder, plan: bool, then: str | None) -> int:
    """Submit the remaining runs as SLURM array jobs, or print the scripts if `plan`. Returns the exit code."""
    from hybridtron.cluster import array

    configs = configs_of(sweep, folder)
    config = configs[sweep.runs[0].name]
    jobs = [*array.arrays_of(sweep, folder, config), *([array.last_of(folder, config, then)] if then else [])]
    if plan:
        print("\n".join(map(array.script, jobs)), end="")
        return 0
    array.require(sweep, jobs, configs)
    numbers = array.submit(sweep, folder, jobs)
    print(f"submitted as job {', '.join(numbers)}" if numbers else "all runs have finished")
    return 0


def steps_of(sweep: Sweep, folder: Folder) -> dict[str, int]:
    """Return each run's last step, or 0 if it depends on a run that has not ended. Raises Unusable."""
    configs = configs_of(sweep, folder)
    return {run.name: last_step(configs[run.name]) if run.name in configs else 0 for run in sweep.runs}


def configs_of(sweep: Sweep, folder: Folder) -> dict[str, Config]:
    """Load the configurations by run name. Raises Unusable if one can't run.

    Runs that start from the weights of an unfinished run are left out.
    """
    configs = {}
    for run in sweep.runs:
        if run.start is None or folder.is_finished(run.start):
            try:
                configs[run.name] = load(folder.settings(run))
                require(configs[run.name])
            except Unusable as error:
                raise Unusable(f"{run.name}: {error}", code=error.code) from error
    return configs


def _watched(sweep: Sweep, folder: Folder, jobs: int, steps: dict[str, int]) -> Iterator[EndedRun]:
    """Run the remaining runs behind a progress bar over the steps of all runs."""
    longest = max(steps.values())
    total_steps = sum(steps[run.name] or longest for run in sweep.runs)
    with progress_bar("steps") as report_progress:
        reached = {run.name: folder.step(run.name) for run in sweep.runs}

        def watch(running: Collection[str]) -> None:
            reached.update((name, folder.step(name)) for name in running)
            report_progress(sum(reached.values()), total_steps)

        yield from carry_out(sweep, folder, jobs, watch)


def report(sweep: Sweep, folder: Folder, console: Console) -> None:
    """Print the table of results; write it, the numbers of each run, and the picture if matplotlib is installed."""
    points = results.points(sweep, folder)
    rows = [results.cells(sweep, point) for point in points]
    header = results.header(sweep)
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    page = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    if SEED in sweep.axes:
        note = f"Mean ± standard error over `{SEED}`, where there are several."
    else:
        note = ""
    write_whole(folder.path / "table.md", "\n".join([f"# {folder.path.name}", "", *page, "", note]).strip() + "\n")
    write_whole(folder.path / "runs.jsonl", "".join(json.dumps(x) + "\n" for x in results.lines(sweep, folder)))
    file_names = ["table.md", "runs.jsonl"]
    shown = [point for point in points if sweep.metrics[0] in point.found]
    if shown and is_there("matplotlib"):
        draw(sweep, shown, folder.path / "picture.png")
        file_names.append("picture.png")
    console.print(f"{folder.path}: {', '.join(file_names)}")


def draw(sweep: Sweep, shown: Sequence[results.Point], output: Path) -> None:
    """Plot the first metric over the first key whose values are all numbers.

    Each combination of the other keys is a curve. Without such a key the points stand side by side under their names.
    """
    metric = sweep.metrics[0]
    along = next((key for key in sweep.axes if key != SEED and all(_is_number(p.values[key]) for p in shown)), None)
    with picture(output) as axes:
        for label, points in _curves(shown, along).items():
            values = [point.found[metric] for point in points]
            if along is None:
                places = list(range(len(points)))
            else:
                places = [float(point.values[along]) for point in points]
            errors = [value.error or 0.0 for value in values]
            axes.errorbar(
                places, [value.mean for value in values], errors, marker="o", capsize=3, label=label or metric
            )
        axes.set(title=output.parent.name, xlabel=along or "", ylabel=metric)
        if along is not None:
            set_places(axes, {point.values[along]: float(point.values[along]) for point in shown})
        else:
            names = [" ".join([point.variant, *point.values.values()]).strip() for point in shown]
            axes.set_xticks(range(len(shown)), names, rotation=30, ha="right")


def set_places(axes: Axes, places: dict[str, float]) -> None:
    """Label the x axis at the tried values; it is logarithmic if they span a factor of TIMES, as learning rates do."""
    smallest = min(places.values())
    largest = max(places.values())
    if smallest > 0 and largest >= TIMES * smallest:
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(places))
    axes.minorticks_off()


def _curves(shown: Sequence[results.Point], along: str | None) -> dict[str, list[results.Point]]:
    """Group points into curves by label; with `along`, a curve's points are sorted by that key."""
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
