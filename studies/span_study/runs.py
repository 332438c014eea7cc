"""Training runs of the adapted hybrids (span.yaml), and the MQAR rows that they are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path

from hybridtron.sweep.grid import SEED, SweepRun
from studies.results import Part
from studies.span_study.asked import LENGTHS, PAIRS, SEED_OF_SAMPLES, recalled, task
from studies.study import selected

HERE = Path(__file__).parent
BASE = "base"
ALONE = "3"  # the seed of variants with only one: the last, so that a stopped study has the main ones first
REPEATED = (BASE, "full", "SW", "S2", "NoMem", "random", "LM", "SE", "SE-lora", "SE-lora_plus")  # with three seeds
LOW_RANK = ("rank=2", "lora-rank=2", "lora-rank=4")  # only with `every`
ROWS = {16: 4, 128: PAIRS, 512: PAIRS}  # row length of training, without its end -> pairs
SHORT, RECALLED, LONG = ROWS


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    settings: tuple[str, ...] = ()
    of_base: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    variants: tuple[str, ...] | None = None  # None: all
    seeds: tuple[str, ...] = ("1", "2", "3")
    every: bool = False  # every variant has all seeds, also those of LOW_RANK
    training: Mapping[int, int] = field(default_factory=lambda: {SHORT: 64_000, RECALLED: 9_600, LONG: 2_000})
    lengths: tuple[int, ...] = LENGTHS
    asked: int = 64  # rows of each length
    timed: tuple[int, ...] = (512, 2048, 8192)  # row lengths at which steps are timed


STUDY = Sizes()
QUICK = Sizes(
    settings=("run.eval_tokens=2K",),
    of_base=("phases.0.tokens=${steps:2}", "phases.1.tokens=${steps:2}", "model.width=32"),
    adapted=("phases.0.tokens=${steps:2}", "phases.0.global_batch=2", "phases.0.micro_batch=2", "model.width=32"),
    variants=(BASE, "full", "SW", "SE"),
    seeds=("1",),
    training={SHORT: 600, RECALLED: 300, LONG: 40},
    lengths=(128, 512),
    asked=2,
    timed=(512,),
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the sweep with its data paths and its measurement."""

    def more(run: SweepRun) -> tuple[str, ...] | None:
        wanted = sizes.every or run.variant not in LOW_RANK
        if sizes.variants is not None:
            wanted = run.variant in sizes.variants
        repeated = sizes.every or run.variant in REPEATED or run.values[SEED] == ALONE
        if not (wanted and repeated and run.values[SEED] in sizes.seeds):
            return None
        if run.variant == BASE:
            folders = (f"data.path={data / str(SHORT)}", f"phases.1.data.path={data / str(RECALLED)}")
            return (*sizes.settings, *sizes.of_base, *folders)
        return (*sizes.settings, *sizes.adapted, f"data.path={data / str(LONG)}")

    sweep, folder = selected(HERE / "span.yaml", runs, more)
    training = {str(length): rows for length, rows in sizes.training.items()}
    asked = {"lengths": list(sizes.lengths), "samples": sizes.asked, "seed": SEED_OF_SAMPLES, "training": training}
    about = {name: value for name, value in asdict(task()).items() if name != "name"}
    return Part(sweep, folder, lambda _, path: recalled(path, sizes.lengths, sizes.asked), {**asked, "task": about})


def write_rows(sizes: Sizes, data: Path) -> None:
    """Write a prepared folder for each length; every sample, with its end, is one row.

    Folders that exist are kept.
    """
    from hybridtron.cli.tasks import prepare_main

    for length, rows in sizes.training.items():
        options = asdict(task(ROWS[length]))
        written = [f"{name}={str(value).lower()}" for name, value in options.items() if name != "name"]
        how_many = ["--length", str(length), "--training", str(rows)]
        if not (data / str(length)).exists():
            with redirect_stdout(StringIO()):
                prepare_main(["mqar", *written, *how_many, "--output", str(data / str(length))])
