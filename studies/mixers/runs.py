"""Training runs of the mixer study (text.yaml, recall.yaml), their measurements, and the rows of MQAR."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SEED, SweepRun
from studies.long_text import Curve, long_text_losses
from studies.results import Part
from studies.study import answers, selected

HERE = Path(__file__).parent
SEQ_LEN = "phases.0.seq_len"
VOCABULARY = 512
PAIRS = {64: 4, 128: 8}  # row length without its end -> number of pairs


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by the sweep's name
    variants: tuple[str, ...] | None = None  # None: all
    seeds: tuple[str, ...] = ("1", "2", "3")
    multiples: int = 16  # length of evaluated rows, in training lengths
    rows: int = 128  # evaluated rows, spread evenly over the held-out text
    training: int = 100_000  # MQAR rows of each length
    asked: int = 500


STUDY = Sizes()
QUICK_ROWS = ("phases.0.global_batch=4", "phases.0.micro_batch=4", "model.width=32", "run.eval_tokens=1K")
QUICK = Sizes(
    settings={
        "text": ("phases.0.tokens=8K", "phases.0.seq_len=128", "model.vocab_size=512", *QUICK_ROWS),
        "recall": QUICK_ROWS,
    },
    variants=("mamba", "gla"),
    seeds=("1",),
    multiples=4,
    rows=4,
    training=60,
    asked=4,
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(part: str, sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the part `text` or `recall`: its runs with their data, and its measurement."""

    def more(run: SweepRun) -> tuple[str, ...] | None:
        if run.values[SEED] not in sizes.seeds or (sizes.variants is not None and run.variant not in sizes.variants):
            return None
        settings = sizes.settings.get(part, ())
        if part == "text":
            return settings
        tokens = int(run.values[SEQ_LEN])
        rows = (f"data.path={data / str(tokens - 1)}", f"phases.0.tokens={sizes.training * tokens}")
        return (*settings, *rows)

    sweep, folder = selected(HERE / f"{part}.yaml", runs / part, more)
    if part == "text":
        asked = {"multiples": sizes.multiples, "rows": sizes.rows}
        return Part(sweep, folder, lambda _, path: of_text(path, sizes), asked)
    pairs = {str(length): number for length, number in PAIRS.items()}
    asked = {"samples": sizes.asked, "vocabulary": VOCABULARY, "pairs": pairs}
    return Part(sweep, folder, lambda _, path: of_recall(path, sizes), asked)


def write_rows(sizes: Sizes, data: Path) -> None:
    """Write a prepared folder for each length; every MQAR sample, with its end, is one row.

    Folders that exist are kept.
    """
    from hybridtron.cli.tasks import prepare_main

    for length, pairs in PAIRS.items():
        if not (data / str(length)).exists():
            with redirect_stdout(StringIO()):
                prepare_main([
                    "mqar", f"pairs={pairs}", f"vocabulary={VOCABULARY}", "follows=true", "--length", str(length),
                    "--training", str(sizes.training), "--output", str(data / str(length)),
                ])  # fmt: skip


def of_text(run: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure the mean loss within the training length, and perplexity by position far beyond it."""
    losses = long_text_losses(run, sizes.multiples, sizes.rows)
    context = len(losses) // sizes.multiples
    return {"loss": statistics.mean(losses[:context]), "curve": asdict(Curve.of(losses, context))}


def of_recall(run: Path, sizes: Sizes) -> float:
    """Measure recall on samples that were not trained on: the share of values that the model finds likeliest."""
    from hybridtron.cli.arguments import newest_checkpoint
    from hybridtron.config.load import load_saved

    length = load_saved(run / "config.yaml").phases[0].seq_len - 1
    options = {"pairs": PAIRS[length], "vocabulary": VOCABULARY, "follows": True}
    task = {"task": "mqar", "lengths": [length], "samples": sizes.asked, "options": options}
    rows = answers(newest_checkpoint(run), {"tasks": [task]}, run / "evaluation/recall", batch=50)
    return next(row["value"] for row in rows if row["metric"] == "accuracy")
