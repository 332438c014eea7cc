"""AdamW and Muon on a laptop: losses of three models at equal tokens and at equal time, with tuned rates.

    python -m studies.optimizers.study           hours on one core; a stopped study continues
    python -m studies.optimizers.study --quick   tiny sizes, minutes: checks that the study runs, not its result

rules.md has the rules, which were written before the first run. The study first times the steps of both optimizers. It
then trains every model at several rates, and at the chosen rates from further seeds. The results so far determine the
next runs. The page and the picture go to this folder, whatever their result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hybridtron.proving.measuring import BenchReport, markdown
from hybridtron.sweep.grid import SEED
from studies.long_text import YES_OR_NO, spread
from studies.optimizers.runs import (
    LADDER,
    OPTIMIZERS,
    RATE,
    TUNED,
    Sizes,
    is_inside,
    lowest,
    measure_times,
    medians_of,
    planned,
    shortened,
    sizes_of,
    times_of,
)
from studies.results import Result, Results, Trained, results_of
from studies.study import Measured, Plan, conduct, parse
from studies.welch import of_two

COMMAND = "make optimizers"
LEVEL = 0.05  # a difference with a smaller p counts
NAMES = {"adamw": "AdamW", "muon": "Muon"}


@dataclass
class ModelResults:
    """A model's results by optimizer: losses by rate, losses by seed at equal tokens and at equal time, and step times.

    `steps` is the number of steps at equal tokens, and `time_steps` has those at equal time.
    """

    parameters: int
    steps: int
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, float]] = field(default_factory=dict)
    time: dict[str, dict[str, float]] = field(default_factory=dict)
    time_steps: dict[str, int] = field(default_factory=dict)
    medians: dict[str, float] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    import torch

    chosen = parse("AdamW and Muon on a laptop.", "optimizers", arguments)
    sizes = sizes_of(chosen.quick)
    chosen.results = chosen.results or results_of("optimizers")
    if not chosen.measure:
        torch.set_num_threads(1)
        measure_times(sizes, chosen.results)
    plan = partial(planned, sizes, chosen.runs, chosen.results)
    writing = partial(write, sizes, chosen.results)
    results = Results(chosen.results)
    while True:
        code = conduct(chosen, plan, writing)
        if code or chosen.measure or is_complete(plan(), results):
            return code


def is_complete(plan: Plan, results: Results) -> bool:
    """Return True if all planned runs have results. The last results can have added runs to the plan."""
    runs = ((name, part, run) for name, part in plan.items() for run in part.sweep.runs)
    return all(results.of(name, part, run) is not None for name, part, run in runs)


def write(sizes: Sizes, kept: Path, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page and the picture of the measured runs."""
    models = gathered(sizes, kept, measured)
    trained = next(result.trained for part in measured.values() for _, result in part)
    draw(models, output / "optimizers.png")
    report = page(models, [*described(trained, sizes), *more])
    (output / "optimizers.md").write_text(report, encoding="utf-8")


def gathered(sizes: Sizes, kept: Path, measured: Measured) -> dict[str, ModelResults]:
    """Group the results by model. At equal time, the optimizer with the shorter step has its runs of equal tokens."""
    models: dict[str, ModelResults] = {}
    for part, of_part in measured.items():
        for run, result in of_part:
            name, _, optimizer = run.variant.rpartition("-")
            model = models.setdefault(name, ModelResults(result.trained.parameters, result.trained.steps))
            add(model, part, optimizer, run.values, result)
    for name, model in models.items():
        model.medians = medians_of(times_of(name, kept))
        slower, steps = shortened(model.steps, model.medians)
        for optimizer in OPTIMIZERS:
            if optimizer == slower:
                model.time_steps[optimizer] = steps
            else:
                model.time_steps[optimizer] = model.steps
                model.time[optimizer] = model.tokens.get(optimizer, {})
    return {name: models[name] for name in sizes.models if name in models}


def add(model: ModelResults, part: str, optimizer: str, values: Mapping[str, str], result: Result) -> None:
    """Add a run's loss to the results of its part."""
    if part == "rates":
        model.rates.setdefault(optimizer, {})[values[RATE]] = result.measured
    elif part == "tokens":
        model.tokens.setdefault(optimizer, {})[values[SEED]] = result.measured
    else:
        model.time.setdefault(optimizer, {})[values[SEED]] = result.measured


def described(trained: Trained, sizes: Sizes) -> list[str]:
    """Return notes that describe training and evaluation."""
    phase = trained.phases[0]
    return [
        "the rules, written before the first run: [rules.md](rules.md)",
        f"{phase.tokens} tokens of {trained.source} text in rows of {phase.seq_len}, {phase.global_batch} rows a step "
        "(studies/optimizers/optimizers.yaml)",
        f"loss: mean over {sizes.rows} held-out rows of {phase.seq_len} tokens after the last step",
        f"rates are chosen with seed {TUNED}; the comparisons have seeds {', '.join(sizes.seeds)}",
        "± is the standard deviation over seeds; that of a difference is its standard error",
        f"an optimizer is called better if the two-sided p of Welch's t-test is below {LEVEL}",
        f"time: processor time of one thread, the median of {sizes.rounds} steps of each optimizer, which take turns",
    ]


def page(models: Mapping[str, ModelResults], notes: Sequence[str]) -> str:
    """Return the full page in Markdown."""
    report = BenchReport("AdamW and Muon on a laptop", notes=list(notes))
    comparison_rows(report, "Loss at equal tokens", {name: model.tokens for name, model in models.items()})
    comparison_rows(report, "Loss at equal time", {name: model.time for name, model in models.items()})
    time_rows(report, models)
    rate_rows(report, models)
    return markdown(report, COMMAND)


def comparison_rows(report: BenchReport, title: str, losses: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Add a table with a comparison for each model whose runs have all been measured.

    `losses` has losses by model, optimizer and seed.
    """
    header = ("model", "AdamW", "Muon", "Muon - AdamW", "p", "better")
    cells = []
    for name, by_optimizer in losses.items():
        samples = [list(by_optimizer.get(optimizer, {}).values()) for optimizer in OPTIMIZERS]
        if len(samples[0]) == len(samples[1]) > 1:
            adamw, muon = samples
            result = of_two(muon, adamw)
            difference = f"{result.mean:+.4f} ± {result.error:.4f}"
            better = "no difference seen"
            if result.p() < LEVEL:
                better = NAMES["muon" if result.mean < 0 else "adamw"]
            cells.append((name, spread(adamw, 4), spread(muon, 4), difference, f"{result.p():.2g}", better))
    report.table(title, header, cells)


def time_rows(report: BenchReport, models: Mapping[str, ModelResults]) -> None:
    """Add the table of step times, and of the steps that the optimizers take in equal time."""
    header = ("model", "parameters", "Muon's step / AdamW's", "steps of AdamW", "steps of Muon")
    cells = [
        (
            name,
            f"{model.parameters:,}",
            f"{model.medians['muon'] / model.medians['adamw']:.3f}",
            f"{model.time_steps['adamw']}",
            f"{model.time_steps['muon']}",
        )
        for name, model in models.items()
    ]
    report.table("Steps in equal time", header, cells)


def rate_rows(report: BenchReport, models: Mapping[str, ModelResults]) -> None:
    """Add the table of losses by rate."""
    columns = [rate for rate in LADDER if any(rate in losses for m in models.values() for losses in m.rates.values())]
    cells = []
    for name, model in models.items():
        for optimizer, losses in model.rates.items():
            row = [f"{losses[rate]:.4f}" if rate in losses else "" for rate in columns]
            inside = YES_OR_NO[is_inside(losses)]
            cells.append((name, NAMES[optimizer], *row, lowest(losses), inside))
    header = ("model", "optimizer", *columns, "lowest at", "inside the rates")
    report.table(f"Loss by rate, seed {TUNED}", header, cells, "optimizers.png")


def draw(models: Mapping[str, ModelResults], path: Path) -> None:
    """Draw the loss by rate, a panel for each model, with the losses of further seeds as crosses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(models) + 0.6, 3.4), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False).flatten()
    for axes, (name, model) in zip(panels, models.items(), strict=True):
        for number, optimizer in enumerate(OPTIMIZERS):
            losses = model.rates.get(optimizer, {})
            rates = sorted(losses, key=float)
            values = [losses[rate] for rate in rates]
            color = f"C{number}"
            axes.plot([float(rate) for rate in rates], values, "o-", color=color, label=NAMES[optimizer])
            seeds = list(model.tokens.get(optimizer, {}).values())
            if seeds:
                axes.plot([float(lowest(losses))] * len(seeds), seeds, "x", color=color)
        axes.set(title=name, xscale="log", xlabel="learning rate", ylabel="held-out loss")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
