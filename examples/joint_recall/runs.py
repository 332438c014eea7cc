"""What the study of joint recall trains (recall.yaml) and measures, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from examples.results import Part, Results
from examples.study import answers, selected
from hybridtron.sweep.grid import SEED, SweepRun

HERE = Path(__file__).parent
RATE = "phases.0.lr"
SYMBOLS = 8
CHANCE = 1 / SYMBOLS
ROWS = {42: "2-4,1-2", 110: "3-6,2-4", 210: "5-8,4-6"}  # tokens of a row without its end -> contexts and keys
FIRST_SEED = "1"
REPEATED = ("", "SW", "KS", "HAX")  # kinds of attention that have three seeds


@dataclass(frozen=True)
class Sizes:
    """How much is done: the real study, or one of a minute."""

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


def kind_of(variant: str) -> tuple[str, str]:
    """`mamba+SW+D` -> the model, and the attention beside it."""
    base, _, attention = variant.partition("+")
    return base, attention


def rates_part(sizes: Sizes, runs: Path, data: Path) -> Part:
    """Every variant at every rate, from one seed."""
    return _part(sizes, runs, data, lambda run: run.values[SEED] == FIRST_SEED)


def seeds_part(sizes: Sizes, runs: Path, data: Path, best: Mapping[str, str]) -> Part:
    """Further seeds of some variants, at the rate that was the best for each."""

    def wanted(run: SweepRun) -> bool:
        again = run.values[SEED] != FIRST_SEED and kind_of(run.variant)[1] in REPEATED and run.variant != "samba"
        return again and best.get(run.variant) == run.values[RATE]

    return _part(sizes, runs, data, wanted)


def best_rates(part: Part, results: Results) -> dict[str, str]:
    """By variant the rate of highest accuracy, where all of its rates have been measured."""
    found: dict[str, dict[str, float | None]] = {}
    for run in part.sweep.runs:
        result = results.of("rates", part, run)
        found.setdefault(run.variant, {})[run.values[RATE]] = None if result is None else result.found
    whole = {name: {rate: got for rate, got in of.items() if got is not None} for name, of in found.items()}
    return {name: max(of, key=of.__getitem__) for name, of in whole.items() if len(of) == len(found[name])}


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
    """For each length a folder in which every table, with its end, is one row."""
    for length, counts in ROWS.items():
        write_tables(length, counts, sizes.training, data / str(length))


def write_tables(length: int, counts: str, training: int, output: Path) -> None:
    """Tables of these numbers of contexts and keys, each with its end a row."""
    from hybridtron.cli.tasks import prepare_main

    if not output.exists():
        with redirect_stdout(StringIO()):
            prepare_main([
                "joint_recall", f"sizes={counts}", f"symbols={SYMBOLS}", "padded=true", "--length", str(length),
                "--training", str(training), "--output", str(output),
            ])  # fmt: skip


def accuracy(run: Path, sizes: Sizes) -> float:
    """The share of values that are the likeliest, by row, of the larger tables, which are not trained on."""
    return accuracy_on(run, max(ROWS), ROWS[max(ROWS)], sizes.asked)


def accuracy_on(run: Path, length: int, counts: str, asked: int) -> float:
    """The same of tables of these numbers of contexts and keys."""
    from hybridtron.cli.given import newest_checkpoint

    options = {"sizes": counts, "symbols": SYMBOLS}
    task = {"task": "joint_recall", "lengths": [length], "samples": asked, "options": options}
    found = answers(newest_checkpoint(run), {"tasks": [task]}, run / "evaluation/recall", batch=50)
    return next(row["value"] for row in found if row["metric"] == "accuracy")
