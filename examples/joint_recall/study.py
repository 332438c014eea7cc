"""Joint recall on a laptop, beside HAX's Table 5: Mamba and Mamba-2 as they are, and with sparse attention.

    python -m examples.joint_recall.study           hours on two cores; a study that was stopped continues
    python -m examples.joint_recall.study --quick   tiny sizes, a minute: does it run, not what does it show

The sweep recall.yaml trains each model on tables that grow, at two rates; the best of the first
seed is trained from two more seeds for the models that the paper compares. Attention to everything, and the models as
they are, say whether the size keeps models apart.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from examples.joint_recall.runs import (
    CHANCE,
    QUICK,
    RATE,
    ROWS,
    STUDY,
    Sizes,
    best_rates,
    kind_of,
    rates_part,
    seeds_part,
    write_rows,
)
from examples.long_text import spread
from examples.results import ROOT, Results
from examples.study import Measured, conduct, parse
from hybridtron.proving.measuring import BenchReport, markdown

PAPER = {
    "mamba": {"": 16.3, "D": 7.8, "SW": 18.7, "SW+D": 16.6, "A": 16.4, "LSH": 11.6, "KS": 36.6, "HAX": 38.0},
    "mamba2": {"": 36.6, "D": 19.6, "SW": 70.6, "SW+D": 48.6, "A": 49.3, "LSH": 13.5, "KS": 60.1, "HAX": 74.3},
    "samba": {"": 6.3},
}
"""Accuracy in percent, of 5 to 16 contexts with 5 to 16 keys after 400,000 steps; chance is 6.25."""
LEAST_FULL = 0.9  # of attention to everything, so that a row can be learned
BASE = (1.5, 5.0)  # times chance, between which the models as they are must lie


def main(arguments: list[str]) -> int:
    """Train what is missing, measure, and write. Returns the exit code."""
    chosen = parse("Joint recall on a laptop.", "joint_recall", arguments)
    sizes = QUICK if chosen.quick else STUDY
    data = chosen.runs / "data" if chosen.quick else ROOT / "data/joint_recall"
    if not chosen.measure:
        write_rows(sizes, data)
    rates = partial(rates_part, sizes, chosen.runs, data)
    writing = partial(write, sizes)
    if code := conduct(chosen, lambda: {"rates": rates()}, writing):
        return code
    best = best_rates(rates(), Results(chosen.results))
    return conduct(chosen, lambda: {"rates": rates(), "seeds": seeds_part(sizes, chosen.runs, data, best)}, writing)


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """The page of what has been measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for run, result in [pair for part in measured.values() for pair in part]:
        found.setdefault(run.variant, {}).setdefault(run.values[RATE], []).append(result.found)
    trained = next(result.trained for part in measured.values() for _, result in part)
    phases = ", then ".join(f"{phase.tokens} tokens in rows of {phase.seq_len}" for phase in trained.phases)
    notes = [
        f"tables of {' and then of '.join(ROWS.values())} contexts and keys; {phases}, in batches of "
        f"{trained.phases[0].global_batch} (configs/recipe/tasks/joint_recall_laptop.yaml)",
        f"accuracy by row over {sizes.asked} larger tables that are not trained on; chance is {CHANCE:.3f}",
        "the rate is the best of those that have been tried on the first seed; ± is the deviation over seeds",
        *more,
    ]
    (output / "joint_recall.md").write_text(page(found, notes), encoding="utf-8")


def page(found: Mapping[str, Mapping[str, list[float]]], notes: list[str]) -> str:
    """The whole page in Markdown; `found` is by variant and rate, the first seed's first."""
    report = BenchReport("Joint recall on a laptop", notes=notes)
    best = {name: max(of.items(), key=lambda pair: pair[1][0]) for name, of in found.items()}
    rows = [
        (name, rate, f"{len(got)}", spread(got), f"{statistics.mean(got) / CHANCE:.1f}x", of_paper(name))
        for name, (rate, got) in best.items()
    ]
    report.table("Accuracy", ("model", "lr", "seeds", "accuracy", "over chance", "the paper's, %"), rows)
    for base in PAPER:
        means = {kind_of(name)[1]: statistics.mean(got) for name, (_, got) in best.items() if kind_of(name)[0] == base}
        goals(report, base, means)
    return markdown(report, "python -m examples.joint_recall.study --results benchmarks/results/joint_recall")


def of_paper(variant: str) -> str:
    base, attention = kind_of(variant)
    number = PAPER[base].get(attention)
    return "" if number is None else f"{number}"


def goals(report: BenchReport, base: str, means: Mapping[str, float]) -> None:
    """Whether the size keeps models apart, and the paper's order."""
    if "full" in means:
        report.at_least(f"{base} with attention to everything", LEAST_FULL, means["full"])
    if "" in means and base != "samba":
        report.at_least(f"{base}, over chance", BASE[0], means[""] / CHANCE)
        report.at_most(f"{base}, over chance", BASE[1], means[""] / CHANCE)
        for name in ("KS", "HAX"):
            if name in means:
                report.at_least(f"{base}+{name} / {base}", 1.0, means[name] / means[""])
        for name in ("LSH", "D"):
            if name in means:
                report.at_most(f"{base}+{name} / {base}", 1.0, means[name] / means[""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
