"""Training runs of the joint-recall study (recall.yaml), their data, and their accuracy.

A first part trains every variant at every learning rate from one seed; a second part adds seeds at the best rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from hybridtron.sweep.grid import SEED, SweepRun
from studies.results import Part, Results
from studies.study import answers, selected

HERE = Path(__file__).parent
RATE = "phases.0.lr"
SYMBOLS = 8
CHANCE = 1 / SYMBOLS
ROWS = {42: "2-4,1-2", 110: "3-6,2-4", 210: "5-8,4-6"}  # row length without its end -> contexts and keys
FIRST_SEED = "1"
SEEDS = ("2", "3")  # further seeds of this study
MORE = {  # further seeds by variant, which studies/again adds
    **dict.fromkeys(("mamba+D", "mamba+LSH"), ("2", "3", "4")),
    **dict.fromkeys(("mamba", "mamba2", "mamba2+KS", "mamba2+HAX"), ("4", "5", "6")),
}
REPEATED = ("", "SW", "KS", "HAX")  # kinds of attention that have three seeds


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    settings: tuple[str, ...] = ()
    variants: tuple[str, ...] | None = None  # None: all
    rates: tuple[str, ...] | None = None
    training: int = 50_000  # rows of each length
    asked: int = 500


STUDY = Sizes()
QUICK = Sizes(
    settings=(
        "phases.0.tokens=${steps:2}",
        "phases.1.tokens=${steps:2}",
        "phases.2.tokens=${steps:2}",
        "model.width=16",
        "run.eval_tokens=1K",
    ),
    variants=("mamba", "mamba+full", "mamba+HAX"),
    rates=("3e-3",),
    training=60,
    asked=4,
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def kind_of(variant: str) -> tuple[str, str]:
    """Split a variant's name into the model and its parallel attention: `mamba+SW+D` -> (`mamba`, `SW+D`)."""
    base, _, attention = variant.partition("+")
    return base, attention


def variant_of(base: str, attention: str) -> str:
    """Return the name of a variant: the model, and if there is any its parallel attention."""
    return f"{base}+{attention}" if attention else base


def rates_part(sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the part with every variant at every rate, from the first seed."""
    return _part(sizes, runs, data, lambda run: run.values[SEED] == FIRST_SEED)


def seeds_part(sizes: Sizes, runs: Path, data: Path, best: Mapping[str, str]) -> Part:
    """Return the part with further seeds of some variants, each at its best rate."""

    def wanted(run: SweepRun) -> bool:
        again = run.values[SEED] in SEEDS and kind_of(run.variant)[1] in REPEATED and run.variant != "samba"
        return again and best.get(run.variant) == run.values[RATE]

    return _part(sizes, runs, data, wanted)


def more_part(sizes: Sizes, runs: Path, data: Path, best: Mapping[str, str]) -> Part:
    """Return the part with the seeds of MORE, each at the best rate of its variant."""

    def wanted(run: SweepRun) -> bool:
        return run.values[SEED] in MORE.get(run.variant, ()) and best.get(run.variant) == run.values[RATE]

    return _part(sizes, runs, data, wanted)


def best_rates(part: Part, results: Results) -> dict[str, str]:
    """Map variants to their rate with the highest accuracy.

    Only variants whose rates have all been measured are included.
    """
    rates = Counter(run.variant for run in part.sweep.runs)
    accuracies: dict[str, dict[str, float]] = {name: {} for name in rates}
    for run in part.sweep.runs:
        result = results.of("rates", part, run)
        if result is not None:
            accuracies[run.variant][run.values[RATE]] = result.measured
    return {
        name: max(by_rate, key=by_rate.__getitem__)
        for name, by_rate in accuracies.items()
        if len(by_rate) == rates[name]
    }


def _part(sizes: Sizes, runs: Path, data: Path, wanted: Callable[[SweepRun], bool]) -> Part:
    def more(run: SweepRun) -> tuple[str, ...] | None:
        known = sizes.variants is None or run.variant in sizes.variants
        at_rate = sizes.rates is None or run.values[RATE] in sizes.rates
        if not (known and at_rate and wanted(run)):
            return None
        later = (f"phases.{index}.data.path={data / str(length)}" for index, length in list(enumerate(ROWS))[1:])
        return (*sizes.settings, f"data.path={data / str(min(ROWS))}", *later)

    sweep, folder = selected(HERE / "recall.yaml", runs / "recall", more)
    asked = {"samples": sizes.asked, "rows": sizes.training, "symbols": SYMBOLS, "sizes": list(ROWS.values())}
    return Part(sweep, folder, lambda _, path: accuracy(path, sizes), asked)


def write_rows(sizes: Sizes, data: Path) -> None:
    """Write a prepared folder for each length; every table, with its end, is one row."""
    for length, counts in ROWS.items():
        write_tables(length, counts, sizes.training, data / str(length))


def write_tables(length: int, counts: str, training: int, output: Path) -> None:
    """Write tables with the given numbers of contexts and keys, each with its end as one row.

    An `output` that exists is kept.
    """
    from hybridtron.cli.tasks import prepare_main

    if not output.exists():
        with redirect_stdout(StringIO()):
            prepare_main([
                "joint_recall", f"sizes={counts}", f"symbols={SYMBOLS}", "padded=true", "--length", str(length),
                "--training", str(training), "--output", str(output),
            ])  # fmt: skip


def accuracy(run: Path, sizes: Sizes) -> float:
    """Return the accuracy on the largest tables.

    That is the mean over rows of the share of values that the model finds likeliest; the samples were not trained on.
    """
    return accuracy_on(run, max(ROWS), ROWS[max(ROWS)], sizes.asked)


def accuracy_on(run: Path, length: int, counts: str, asked: int) -> float:
    """Return the accuracy on tables with the given numbers of contexts and keys."""
    from hybridtron.cli.arguments import newest_checkpoint

    options = {"sizes": counts, "symbols": SYMBOLS}
    task = {"task": "joint_recall", "lengths": [length], "samples": asked, "options": options}
    rows = answers(newest_checkpoint(run), {"tasks": [task]}, run / "evaluation/recall", batch=50)
    return next(row["value"] for row in rows if row["metric"] == "accuracy")
