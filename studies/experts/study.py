"""Two models with experts beside their dense sibling: held-out loss at equal tokens, and the loads over the steps.

    python -m studies.experts.study           about two hours on one core; a stopped study continues
    python -m studies.experts.study --quick   tiny sizes, a minute or two: checks that the study runs, not its result

The sweep experts.yaml trains three recipes, of equally many FLOPs a token, from three seeds each. The page and the
picture go to this folder, whatever their result.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron.proving.measuring import BenchReport, markdown
from hybridtron.sweep.grid import SEED
from studies.experts.runs import DENSE, LAST, ROUTED, Sizes, final_load, part_of, sizes_of
from studies.judge import Verdict, below, decided, within
from studies.judge import notes as judged_by
from studies.long_text import spread
from studies.results import Result, results_of
from studies.study import Measured, conduct, parse

COMMAND = "make experts"
NAMES = {
    DENSE: "dense MLPs (`laptop`)",
    "auxiliary": "experts, softmax, loads kept even by a loss (`moe_laptop`)",
    "bias": "experts, sigmoid, loads kept even by a correction (`moe_bias_laptop`)",
}
EVEN = 1.5  # load of the most loaded expert over the mean load, below which loads are called even
Found = Mapping[str, Mapping[str, Any]]
"""A variant's measured values by seed."""


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("Experts beside their dense sibling.", "experts", arguments)
    sizes = sizes_of(chosen.quick)
    chosen.results = chosen.results or results_of("experts")
    return conduct(chosen, lambda: {"experts": part_of(sizes, chosen.runs)}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page and the picture of the measured runs."""
    found: dict[str, dict[str, Any]] = {}
    results: dict[str, Result] = {}
    for run, result in measured["experts"]:
        found.setdefault(run.variant, {})[run.values[SEED]] = result.measured
        results[run.variant] = result
    draw(found, output / "experts.png")
    report = page(found, results, [*described(results, sizes), *more, *judged_by()])
    (output / "experts.md").write_text(report, encoding="utf-8")


def described(results: Mapping[str, Result], sizes: Sizes) -> list[str]:
    """Return notes that describe training and evaluation."""
    trained = next(iter(results.values())).trained
    phase = trained.phases[0]
    return [
        f"{phase.tokens} tokens of {trained.source} text in rows of {phase.seq_len}, {phase.global_batch} rows a step, "
        f"{trained.steps} steps (studies/experts/experts.yaml)",
        f"loss: mean over {sizes.rows} held-out rows of {phase.seq_len} tokens after the last step",
        f"loads: the largest load of an expert over the mean load, of the most uneven router, in the last {LAST:.0%} "
        "of the steps",
        "rules, written before the first run: a model with experts learns if its loss is below that of its dense "
        f"sibling; a correction keeps loads even if they end below {EVEN}",
        "± is the standard deviation over seeds",
    ]


def page(found: Found, results: Mapping[str, Result], notes: Sequence[str]) -> str:
    """Return the full page in Markdown."""
    report = BenchReport("Experts beside their dense sibling", notes=list(notes))
    rows = []
    for variant, name in NAMES.items():
        if variant not in found:
            continue
        of_seeds = found[variant].values()
        losses = [of_seed["loss"] for of_seed in of_seeds]
        loads = spread([final_load(of_seed["loads"]) for of_seed in of_seeds], 3) if variant in ROUTED else ""
        minutes = f"{results[variant].minutes:.0f}"
        rows.append((name, f"{results[variant].trained.parameters:,}", spread(losses, 4), loads, minutes))
    header = ("model", "parameters", "held-out loss", "load max / mean at the end", "minutes of steps of a run")
    report.table("Losses at equal tokens, and final loads", header, rows, "experts.png")
    verdicts = [(claim, verdict.said.value, verdict.numbers) for claim, verdict in judged(found).items()]
    report.table("Claims", ("claim", "outcome", "numbers"), verdicts)
    return markdown(report, COMMAND)


def judged(found: Found) -> dict[str, Verdict]:
    """Return the outcome of each claim."""
    losses = {
        variant: {seed: of_seed["loss"] for seed, of_seed in of_seeds.items()} for variant, of_seeds in found.items()
    }
    verdicts = {}
    for variant in ROUTED:
        name = f"loss, {variant} and dense"
        claim = f"experts ({variant}) have a lower loss than dense MLPs at equal tokens and FLOPs a token"
        verdicts[claim] = decided([below(name, losses.get(variant, {}), losses.get(DENSE, {}))])
    ends = {seed: final_load(of_seed["loads"]) for seed, of_seed in found.get("bias", {}).items()}
    verdicts["a correction (bias) keeps the loads even"] = decided([within("load max / mean", ends, high=EVEN)])
    return verdicts


def draw(found: Found, path: Path) -> None:
    """Draw the loads over the steps, with a panel for each model with experts and a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(ROUTED), sharey=True)
    for axes, variant in zip(panels, ROUTED, strict=True):
        for seed, of_seed in found.get(variant, {}).items():
            steps = [point[0] for point in of_seed["loads"]]
            means = [statistics.fmean(point[1:]) for point in of_seed["loads"]]
            most = [max(point[1:]) for point in of_seed["loads"]]
            (line,) = axes.plot(steps, means, label=f"seed {seed}")
            axes.plot(steps, most, ":", color=line.get_color(), linewidth=0.8)
        axes.axhline(EVEN, color="gray", linewidth=0.8)
        axes.set(title=f"{variant}: mean of routers\n(dotted: the most uneven)", xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("largest load / mean load")
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
