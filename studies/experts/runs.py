"""Training runs of the study of experts (experts.yaml), and the measurement of each: its loss and its loads.

The loads are those of `routers` in the run's metrics.jsonl: for each router the largest load of an expert divided by
the mean load.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SweepRun
from hybridtron.train.jsonl import read_lines
from studies.long_text import long_text_losses
from studies.results import Part
from studies.study import selected

HERE = Path(__file__).parent
DENSE = "dense"
ROUTED = ("auxiliary", "bias")  # variants with experts
LAST = 0.05  # share of the steps, at the end, over which a run's final loads are averaged


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute or two."""

    settings: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ("1", "2", "3")
    rows: int = 512  # evaluated rows, spread evenly over the held-out text
    every: int = 10  # steps that a point of the curve of loads averages


STUDY = Sizes()
QUICK = Sizes(
    settings=(
        "phases.0.tokens=${steps:6}",
        "phases.0.seq_len=64",
        "phases.0.global_batch=2",
        "phases.0.micro_batch=2",
        "model.width=32",
        "model.vocab_size=512",
        "model.layers.-.hidden=32",
        "model.layers.W.window=32",
        "run.eval_tokens=1K",
    ),
    seeds=("1", "2"),
    rows=4,
    every=2,
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(sizes: Sizes, runs: Path) -> Part:
    """Return the sweep with its measurement."""

    def more(run: SweepRun) -> tuple[str, ...] | None:
        return sizes.settings if run.values["run.seed"] in sizes.seeds else None

    sweep, folder = selected(HERE / "experts.yaml", runs, more)
    return Part(sweep, folder, lambda _, path: found_of(path, sizes), {"rows": sizes.rows, "every": sizes.every})


def found_of(run: Path, sizes: Sizes) -> dict[str, Any]:
    """Return a run's held-out loss, and the curve of its loads: [step, load of each router]. Dense runs have no curve.

    A point of the curve is the mean over `sizes.every` steps, and has the number of the last one.
    """
    loss = statistics.mean(long_text_losses(run, 1, sizes.rows))
    steps = [
        (line["step"], [router["load_max_over_mean"] for router in line["routers"].values()])
        for line in read_lines(run / "metrics.jsonl")
        if "routers" in line
    ]
    return {"loss": loss, "loads": averaged(steps, sizes.every)}


def averaged(steps: Sequence[tuple[int, Sequence[float]]], every: int) -> list[list[float]]:
    """Return the means of each router's load over groups of `every` steps, after the last step of each group."""
    groups = [steps[start : start + every] for start in range(0, len(steps), every)]
    points = []
    for group in groups:
        loads = zip(*(of_step for _, of_step in group), strict=True)
        points.append([float(group[-1][0]), *(round(statistics.fmean(of_router), 4) for of_router in loads)])
    return points


def final_load(curve: Sequence[Sequence[float]]) -> float:
    """Return the load of the most uneven router, averaged over the last points of a curve."""
    count = max(1, round(LAST * len(curve)))
    last = curve[-count:]
    return max(statistics.fmean(of_router) for of_router in list(zip(*last, strict=True))[1:])
