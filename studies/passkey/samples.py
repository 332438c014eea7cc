"""Training data for the passkey study, and the evaluation of its checkpoints.

Each length has a folder of samples. The last checkpoint is evaluated at several lengths, the earlier ones at the
training length.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from hybridtron.checkpoint.folder import all_of, step_of
from hybridtron.sweep.grid import SweepRun
from hybridtron.train.jsonl import read_lines
from studies.results import Part
from studies.study import answers, selected

HERE = Path(__file__).parent
END = "<|endoftext|>"
TEXT = "text"  # the phase before the samples
LONGER = "samba_longer"  # the variant with a longer last phase
MIXED = (3, 4)  # phases that mix the lengths
EVERY = 10  # steps in each point of the loss curve


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    settings: tuple[str, ...] = ()
    variants: tuple[str, ...] | None = None  # None: all
    digits: int = 4
    lengths: tuple[int, ...] = (128, 256, 512)  # of documents, end of text included
    training: int = 12_000  # samples of each length
    vocab_size: int = 1024
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)  # evaluated lengths, as multiples of the longest
    trained: int = 220  # evaluated samples at the training length
    longer: int = 55  # evaluated samples at each other length
    steps: int = 22  # evaluated samples of each earlier checkpoint


STUDY = Sizes()
QUICK = Sizes(
    settings=(
        "model.width=32", "run.eval_tokens=2K", "run.eval_every=5", "checkpoint.every=5", "checkpoint.keep_every=5",
        *(f"phases.{phase}.{size}=4" for phase in range(5) for size in ("global_batch", "micro_batch")),
        *(f"phases.{phase}.tokens=4K" for phase in range(5)),
    ),
    variants=("samba", "mamba2_fitted"),
    training=400,
    multiples=(1, 2),
    trained=11,
    longer=2,
    steps=1,
)  # fmt: skip


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(sizes: Sizes, runs: Path, data: Path, file: Path = HERE / "passkey.yaml") -> Part:
    """Return the sweep in a file with its data paths and its measurement.

    `data` is the folder with the text and the samples.
    """
    paths = [f"phases.{phase}.data.path={data / str(length)}" for phase, length in enumerate(sizes.lengths[:-1], 1)]
    paths += [
        f"phases.{phase}.data.mixture.length{length}.path={data / str(length)}"
        for phase in MIXED
        for length in sizes.lengths
    ]

    def more(run: SweepRun) -> tuple[str, ...] | None:
        if sizes.variants is not None and run.variant not in sizes.variants:
            return None
        return (*sizes.settings, f"data.path={data / 'text'}", *paths)

    def measure(run: SweepRun, path: Path) -> dict[str, Any]:
        return asdict(answers_of(path, sizes, zero_shot=run.variant.startswith("mamba2")))

    sizes_asked = ("digits", "lengths", "training", "vocab_size", "multiples", "trained", "longer", "steps")
    sweep, folder = selected(file, runs, more)
    return Part(sweep, folder, measure, {name: getattr(sizes, name) for name in sizes_asked})


def write_samples(sizes: Sizes, data: Path) -> None:
    """Write the text with its tokenizer, and a prepared folder of samples for each length.

    In those folders every sample, with its end of text, is one row. Folders that exist are kept.
    """
    from hybridtron.cli.data_prepare import main as prepare
    from hybridtron.cli.tasks import write_main
    from hybridtron.data.prepare.embedded import prepare_embedded

    text = data / "text"
    prepare_embedded(text, sizes.vocab_size)
    for length in sizes.lengths:
        samples = data / f"samples-{length}"
        folder = data / str(length)
        with redirect_stdout(StringIO()):
            if not samples.exists():
                write_main([
                    "passkey", f"digits={sizes.digits}", "depth_steps=0", "--length", str(length - 1), "--output",
                    str(samples), "--training", str(sizes.training), "--evaluation", "0", "--tokenizer", str(text),
                ])  # fmt: skip
            if not folder.exists():
                prepare([
                    "--input", str(samples / "training"), "--learn", "completion", "--validation", "2%", "--source",
                    "passkey", "--tokenizer", str(text), "--eos", END, "--output", str(folder),
                ])  # fmt: skip


def asked(sizes: Sizes, lengths: Mapping[int, int]) -> dict[str, Any]:
    """Return the content of a file for `hybridtron evaluate --tasks`.

    `lengths` maps multiples of the longest row to numbers of samples.
    """
    options = {"digits": sizes.digits}
    tasks = [
        {"task": "passkey", "lengths": [multiple * sizes.lengths[-1]], "samples": samples, "options": options}
        for multiple, samples in lengths.items()
    ]
    return {"tasks": tasks}


@dataclass(frozen=True)
class Found:
    """A run's results.

    `last` and `text` are rows by length: the last checkpoint's, and those of the text phase's checkpoint. `accuracy`
    and `losses` are pairs of step and value; losses are means over EVERY steps.
    """

    last: list[dict[str, Any]] = field(default_factory=list)
    text: list[dict[str, Any]] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)


def answers_of(run: Path, sizes: Sizes, zero_shot: bool) -> Found:
    """Evaluate every checkpoint from the end of the text phase on, and the last one at all lengths.

    With `zero_shot` the checkpoint at the end of the text phase is evaluated at all lengths too.
    """
    lines = read_lines(run / "metrics.jsonl")
    ended = max(line["step"] for line in lines if line["phase"] == TEXT)
    samples = dict.fromkeys(sizes.multiples, sizes.longer)
    samples[1] = sizes.trained
    checkpoints = {step: folder for folder in all_of(run) if (step := step_of(folder)) >= ended}
    accuracy = []
    for step, folder in checkpoints.items():
        rows = exact(answers(folder, asked(sizes, {1: sizes.steps}), run / "evaluation/by_step" / folder.name))
        accuracy.append((step, rows[0]["value"]))
    last = exact(answers(checkpoints[max(checkpoints)], asked(sizes, samples), run / "evaluation/last"))
    text = []
    if zero_shot:
        text = exact(answers(checkpoints[ended], asked(sizes, samples), run / "evaluation/text"))
    return Found(last, text, accuracy, means([line for line in lines if line["phase"] != TEXT]))


def means(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return pairs of step and loss: the mean loss of every EVERY steps, at the last of them."""
    parts = [lines[begin : begin + EVERY] for begin in range(0, len(lines), EVERY)]
    return [(part[-1]["step"], round(statistics.mean(line["loss"] for line in part), 5)) for part in parts]


def exact(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the metric `exact`, without the `about` that says how they were measured."""
    return [{key: row[key] for key in row if key != "about"} for row in rows if row["metric"] == "exact"]
