"""Joint recall on a laptop, compared with HAX's Table 5: Mamba and Mamba-2, alone and with sparse attention.

    python -m studies.joint_recall.study           hours on two cores; a stopped study continues
    python -m studies.joint_recall.study --quick   tiny sizes, a minute: checks that the study runs, not its result

The sweep recall.yaml trains each model on growing tables at two learning rates. The models that the paper compares are
trained from two more seeds at their best rate. Runs with full attention, and the bare recurrences, show whether models
of this size differ measurably.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hybridtron.proving.measuring import BenchReport, markdown
from studies.joint_recall.order import HERE, ORDERS, PAPER, WHY, claims, of_paper, orders, reasons
from studies.joint_recall.runs import (
    CHANCE,
    RATE,
    ROWS,
    Sizes,
    best_rates,
    rates_part,
    seeds_part,
    sizes_of,
    write_rows,
)
from studies.judge import notes as judged_by
from studies.long_text import spread
from studies.results import Results
from studies.study import Measured, conduct, parse

LEAST_FULL = 0.9  # accuracy that full attention must reach, or the task cannot be learned
BASE = (1.5, 5.0)  # range for the accuracy of bare recurrences, as multiples of chance


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("Joint recall on a laptop.", "joint_recall", arguments)
    sizes = sizes_of(chosen.quick)
    if not chosen.measure:
        write_rows(sizes, chosen.data)
    rates = partial(rates_part, sizes, chosen.runs, chosen.data)
    writing = partial(write, sizes)
    if code := conduct(chosen, lambda: {"rates": rates()}, writing):
        return code
    best = best_rates(rates(), Results(chosen.results))
    seeds = partial(seeds_part, sizes, chosen.runs, chosen.data, best)
    return conduct(chosen, lambda: {"rates": rates(), "seeds": seeds()}, writing)


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page of the measured runs."""
    accuracies: dict[str, dict[str, list[float]]] = {}
    for run, result in [pair for part in measured.values() for pair in part]:
        accuracies.setdefault(run.variant, {}).setdefault(run.values[RATE], []).append(result.measured)
    trained = next(result.trained for part in measured.values() for _, result in part)
    phases = ", then ".join(f"{phase.tokens} tokens in rows of {phase.seq_len}" for phase in trained.phases)
    notes = [
        f"tables of {' and then of '.join(ROWS.values())} contexts and keys; {phases}, in batches of "
        f"{trained.phases[0].global_batch} (configs/recipe/tasks/joint_recall_laptop.yaml)",
        f"accuracy by row over {sizes.asked} larger tables that are not trained on; chance is {CHANCE:.3f}",
        "the rate is the best of those that have been tried on the first seed, which counts among the seeds; ± is the "
        "deviation over seeds",
        *judged_by(),
        *more,
    ]
    (output / "joint_recall.md").write_text(page(accuracies, notes), encoding="utf-8")


def page(found: Mapping[str, Mapping[str, list[float]]], notes: list[str]) -> str:
    """Return the full page in Markdown.

    `found` maps variants and rates to accuracies, the first seed's first.
    """
    report = BenchReport("Joint recall on a laptop", notes=notes)
    best = {name: max(by_rate.items(), key=lambda pair: pair[1][0]) for name, by_rate in found.items()}
    rows = [
        (
            name,
            rate,
            f"{len(seeds)}",
            spread(seeds),
            f"{statistics.mean(seeds) / CHANCE:.1f}x",
            f"{of_paper(name) or ''}",
        )
        for name, (rate, seeds) in best.items()
    ]
    report.table("Accuracy", ("model", "lr", "seeds", "accuracy", "over chance", "the paper's, %"), rows)
    means = {name: statistics.mean(seeds) for name, (_, seeds) in best.items()}
    percent = {
        name: {str(seed): 100 * accuracy for seed, accuracy in enumerate(seeds, 1)} for name, (_, seeds) in best.items()
    }
    report.table("What the paper says of pairs", HERE, claims(percent))
    report.table("The whole order of the means", ORDERS, orders(means))
    if why := list(reasons(means)):
        report.table("Why another order came out", WHY, why)
    for base in PAPER:
        goals(report, base, means)
    return markdown(report, "python -m studies.joint_recall.study --results studies/joint_recall/results")


def goals(report: BenchReport, base: str, means: Mapping[str, float]) -> None:
    """Add the checks that models of this size differ measurably."""
    if f"{base}+full" in means:
        report.at_least(f"{base} with attention to everything", LEAST_FULL, means[f"{base}+full"])
    if base in means and base != "samba":
        report.at_least(f"{base}, over chance", BASE[0], means[base] / CHANCE)
        report.at_most(f"{base}, over chance", BASE[1], means[base] / CHANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
