"""A sweep's results: the last metrics of every run, and each point's mean and standard error over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridtron.evaluate.results import mean_of
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import SEED, Sweep, SweepRun
from hybridtron.train.metrics import flat
from hybridtron.train.records import read_lines


@dataclass(frozen=True)
class Value:
    """A point's metric: its mean over the seeds, the standard error (None with one seed), and the number of runs."""

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, found: Sequence[float]) -> Value:
        """Compute mean and standard error over runs."""
        measured = mean_of(found)
        return cls(measured["value"], measured["standard_error"], measured["n"])

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mean:.5g}"
        return f"{self.mean:.5g} ± {self.error:.2g}"


@dataclass(frozen=True)
class Point:
    """The settings that runs with different seeds share, and their mean metrics."""

    variant: str
    values: dict[str, str]  # by key, without the seed
    found: dict[str, Value]  # by metric; a metric that no run has is absent


def points(sweep: Sweep, folder: Folder) -> list[Point]:
    """Compute each point's metrics over its finished runs, in the order in which the sweep lists them."""
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
    """Read the last value of each wanted metric from a run's folder; metrics that it lacks are left out."""
    last_values: dict[str, float] = {}
    for line in read_lines(folder.of(run.name) / "metrics.jsonl"):
        numbers = flat(line)
        last_values |= {name: numbers[name] for name in metrics if name in numbers}
    return last_values


def lines(sweep: Sweep, folder: Folder) -> list[dict[str, Any]]:
    """Return one dictionary of plain values for each run."""
    return [
        {
            "run": run.name, "variant": run.variant, **run.values, "finished": folder.is_finished(run.name),
            **last_metrics(folder, run, sweep.metrics),
        }
        for run in sweep.runs
    ]  # fmt: skip


def header(sweep: Sweep) -> list[str]:
    """Return the table's column names."""
    if any(run.variant for run in sweep.runs):
        variants = ["variant"]
    else:
        variants = []
    return [*variants, *(key for key in sweep.axes if key != SEED), "n", *sweep.metrics]


def cells(sweep: Sweep, point: Point) -> list[str]:
    """Return a point's row in the table."""
    if any(run.variant for run in sweep.runs):
        variant = [point.variant]
    else:
        variant = []
    n = max((value.n for value in point.found.values()), default=0)
    return [*variant, *point.values.values(), str(n), *(str(point.found.get(metric, "")) for metric in sweep.metrics)]
