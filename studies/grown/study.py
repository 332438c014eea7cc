"""HAX grown next to a Mamba that was trained on text: needles found before and after tuning, as in HAX's Table 1.

    python -m studies.grown.study           half an hour on one core; a stopped study continues
    python -m studies.grown.study --quick   tiny sizes, a minute: checks that the study runs, not its result

The sweep grown.yaml trains recipe=hax_mamba_laptop. It continues that model once unchanged and once with HAX grown at
gates of 0, and tunes both on keys in filler. Each model is evaluated at its longest row of tuning and at twice that.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron.config.units import readable
from hybridtron.evaluate.results import shown
from hybridtron.proving.measuring import BenchReport, markdown
from hybridtron.sweep.grid import SweepRun
from studies.grown.runs import MULTIPLES, TUNED, Sizes, part_of, sizes_of, write_samples
from studies.results import Result
from studies.study import Measured, conduct, parse

NAMES = {"base": "Mamba, the text alone", "mamba": "Mamba, continued", "hax": "+HAX, continued"}
LEAST = 0.5  # share of keys that the better tuned model must find, or the task is too hard for a comparison
Found = Mapping[str, Any]


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("HAX grown beside a Mamba.", "grown", arguments)
    sizes = sizes_of(chosen.quick)
    if not chosen.measure:
        write_samples(sizes, chosen.data)
    return conduct(chosen, lambda: {"grown": part_of(sizes, chosen.runs, chosen.data)}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page of the measured runs."""
    runs = measured["grown"]
    results = {run.variant: result.measured for run, result in runs}
    notes = [*described(runs, sizes), *more]
    (output / "grown.md").write_text(page(results, max(sizes.lengths), notes), encoding="utf-8")


def described(runs: Sequence[tuple[SweepRun, Result]], sizes: Sizes) -> list[str]:
    """Return notes that describe models, training and evaluation."""
    notes = []
    for run, result in runs:
        trained = result.trained
        phases = " + ".join(f"{phase.tokens} tokens in rows of {phase.seq_len}" for phase in trained.phases)
        size = f"{readable(trained.parameters)} parameters, {trained.pattern}, width {trained.width}"
        notes.append(f"{run.variant}: {size}; {phases}; seed {trained.seed}; {result.minutes:.0f} minutes of steps")
    digits = " or ".join(map(str, sizes.digits))
    return [
        *notes,
        "recipes hax_mamba_laptop, hax_mamba_laptop_continual and hax_mamba_laptop_needles; each starts from the "
        "checkpoint of lowest held-out loss before it",
        f"needles: keys of {digits} digits in filler, at drawn depths, the answer alone learned, {sizes.training} "
        f"samples of each and of {' and '.join(map(str, sizes.lengths))} tokens",
        f"asked: {sizes.asked} keys each, over 11 depths, with seeds not tuned on; ± is the standard error",
    ]


def page(found: Mapping[str, Found], length: int, notes: list[str]) -> str:
    """Return the full page in Markdown.

    `found` maps variants to their results, `length` is the longest row of tuning.
    """
    report = BenchReport("HAX grown beside a Mamba", notes=notes)
    lengths = [multiple * length for multiple in MULTIPLES]
    digits = list(dict.fromkeys(row["digits"] for one in found.values() for row in one["needles"]))
    columns = [(each, at) for at in lengths for each in digits]
    header = ("model", *(f"{each} digits, {at} tokens" for each, at in columns), "average", "held-out loss")
    rows = []
    for variant, name in named(found).items():
        by = {(row["digits"], row["length"]): row for row in found[variant]["needles"]}
        average = statistics.mean(by[column]["value"] for column in columns)
        shares = (shown(by[column]) for column in columns)
        rows.append((name, *shares, f"{average:.3f}", f"{found[variant]['loss']:.3f}"))
    report.table("Keys that were found, before and after tuning on needles", header, rows)
    means = {variant: mean_of(one, length) for variant, one in found.items()}
    if best := [means[variant] for variant in means if variant.endswith(TUNED)]:
        report.at_least(f"the better tuned model at {length} tokens", LEAST, max(best))
    if {f"mamba{TUNED}", f"hax{TUNED}"} <= found.keys():
        for at in lengths:
            gained = mean_of(found[f"hax{TUNED}"], at) - mean_of(found[f"mamba{TUNED}"], at)
            report.at_least(f"what HAX adds after tuning, at {at} tokens", 0.0, gained)
    return markdown(report, "make grown")


def named(found: Mapping[str, Found]) -> dict[str, str]:
    """Map measured variants to their names on the page: first those before tuning, then the tuned ones."""
    tuned = {f"{variant}{TUNED}": f"{name}, tuned" for variant, name in NAMES.items()}
    return {variant: name for variant, name in {**NAMES, **tuned}.items() if variant in found}


def mean_of(one: Found, length: int) -> float:
    """Return the share of keys that a variant finds at a length, averaged over both numbers of digits."""
    return statistics.mean(row["value"] for row in one["needles"] if row["length"] == length)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
