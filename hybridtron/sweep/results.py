"""Results from a sweep: every run's last metrics, and their mean and standard error for each point.

Runs that differ only in `run.seed` form a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridtron.evaluate.results import mean_of
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import SEED, Sweep, SweepRun
from hybridtron.train.jsonl import read_lines
from hybridtron.train.metrics import flat


@dataclass(frozen=True)
class Value:
    """A point's metric: the mean over `n` runs, and its standard error (None for one run)."""

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Value:
        """Compute the mean and its standard error from the runs' values."""
        measured = mean_of(values)
        return cls(measured["value"], measured["standard_error"], measured["n"])

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mean:.5g}"
        return f"{self.mean:.5g} ± {self.error:.2g}"


@dataclass(frozen=True)
class Point:
    """A variant with values in the grid, and its runs' mean metrics; the runs differ only in the seed."""

    variant: str
    values: dict[str, str]  # values in the grid by key, without the seed
    metrics: dict[str, Value]  # by name; absent if no run has the metric


def points(sweep: Sweep, folder: Folder) -> list[Point]:
    """Compute each point's metrics from its finished runs. A point without a finished run is left out."""
    runs_by_point: dict[tuple[str, ...], list[SweepRun]] = {}
    for run in sweep.runs:
        if folder.is_finished(run.name):
            runs_by_point.setdefault(run.point, []).append(run)
    sweep_points = []
    for runs in runs_by_point.values():
        measured = [last_metrics(folder, run, sweep.metrics) for run in runs]
        metric_values = {
            metric: Value.of(numbers)
            for metric in sweep.metrics
            if (numbers := [run_metrics[metric] for run_metrics in measured if metric in run_metrics])
        }
        grid_values = {key: value for key, value in runs[0].values.items() if key != SEED}
        sweep_points.append(Point(runs[0].variant, grid_values, metric_values))
    return sweep_points


def last_metrics(folder: Folder, run: SweepRun, metrics: Sequence[str]) -> dict[str, float]:
    """Read each metric's last value from a run's metrics.jsonl. Metrics without a value are left out."""
    last_values: dict[str, float] = {}
    for line in read_lines(folder.of(run.name) / "metrics.jsonl"):
        numbers = flat(line)
        last_values |= {name: numbers[name] for name in metrics if name in numbers}
    return last_values


def lines(sweep: Sweep, folder: Folder) -> list[dict[str, Any]]:
    """Return a dictionary for each run, with name, variant, values in the grid, `finished`, and last metrics."""
    return [
        {
            "run": run.name, "variant": run.variant, **run.values, "finished": folder.is_finished(run.name),
            **last_metrics(folder, run, sweep.metrics),
        }
        for run in sweep.runs
    ]  # fmt: skip


def header(sweep: Sweep) -> list[str]:
    """Return the column names for the table of points. The variants' column is left out if no variant has a name."""
    if any(run.variant for run in sweep.runs):
        variants = ["variant"]
    else:
        variants = []
    return [*variants, *(key for key in sweep.axes if key != SEED), "n", *sweep.metrics]


def cells(sweep: Sweep, point: Point) -> list[str]:
    """Return the cells of a point's table row, in the order of `header`."""
    if any(run.variant for run in sweep.runs):
        variant = [point.variant]
    else:
        variant = []
    n = max((value.n for value in point.metrics.values()), default=0)
    return [*variant, *point.values.values(), str(n), *(str(point.metrics.get(metric, "")) for metric in sweep.metrics)]
