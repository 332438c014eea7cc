"""Training runs of the grown-model study (grown.yaml) and the evaluation of each.

Every run is asked for needles (keys hidden in filler text), before and after it was tuned on them. The module also
prepares the text and the needle samples.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SEED, SweepRun
from hybridtron.train.jsonl import read_lines
from studies.results import Part
from studies.study import answers, selected

HERE = Path(__file__).parent
END = "<|endoftext|>"
TUNED = "-needles"  # suffix of the names of tuned runs
MULTIPLES = (1, 2)  # evaluated lengths, as multiples of the longest row


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    settings: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ("1",)
    tuning: tuple[str, ...] = ()  # further settings of tuned runs
    digits: tuple[int, ...] = (3, 4)  # of a key: one task each
    lengths: tuple[int, ...] = (128, 256)  # of documents, end of text included
    training: int = 6000  # samples of each task and length
    vocab_size: int = 1024
    asked: int = 220  # samples of each task and length


STUDY = Sizes()
QUICK = Sizes(
    settings=(
        "model.width=32", "run.eval_tokens=2K", "run.eval_every=4", "checkpoint.every=4",
        "phases.0.tokens=4K", "phases.0.global_batch=4", "phases.0.micro_batch=4",
    ),
    tuning=("phases.1.tokens=4K", "phases.1.global_batch=4", "phases.1.micro_batch=4"),
    training=100,
    asked=11,
)  # fmt: skip


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the sweep with its data paths and its measurement.

    `data` is the folder with the text and the samples.
    """
    text = (f"data.path={data / 'text'}",)
    mixed = (f"phases.1.data.mixture.length{length}.path={data / str(length)}" for length in sizes.lengths)
    samples = (f"data.path={data / str(min(sizes.lengths))}", *mixed)

    def more(run: SweepRun) -> tuple[str, ...] | None:
        if run.values[SEED] not in sizes.seeds:
            return None
        if not run.variant.endswith(TUNED):
            return (*sizes.settings, *text)
        settings = (text for text in sizes.settings if not text.startswith("model."))  # the checkpoint's model stays
        return (*settings, *sizes.tuning, *samples)

    sweep, folder = selected(HERE / "grown.yaml", runs, more)
    asked = {name: getattr(sizes, name) for name in ("digits", "lengths", "training", "vocab_size", "asked")}
    return Part(sweep, folder, lambda _, path: found_of(path, sizes), asked)


def write_samples(sizes: Sizes, data: Path) -> None:
    """Write the text with its tokenizer, and a prepared folder of needle samples for each length.

    In those folders every sample, with its end of text, is one row. Folders that exist are kept.
    """
    from hybridtron.cli.data_prepare import main as prepare
    from hybridtron.cli.tasks import write_main
    from hybridtron.data.prepare.embedded import prepare_embedded

    text = data / "text"
    prepare_embedded(text, sizes.vocab_size)
    for length in sizes.lengths:
        samples = {digits: data / f"samples-{digits}-{length}" for digits in sizes.digits}
        with redirect_stdout(StringIO()):
            for digits, folder in samples.items():
                if not folder.exists():
                    write_main([
                        "passkey", f"digits={digits}", "depth_steps=0", "--length", str(length - 1), "--output",
                        str(folder), "--training", str(sizes.training), "--evaluation", "0", "--tokenizer", str(text),
                    ])  # fmt: skip
            if not (data / str(length)).exists():
                prepare([
                    "--input", *(str(folder / "training") for folder in samples.values()), "--learn", "completion",
                    "--validation", "2%", "--source", "needles", "--tokenizer", str(text), "--eos", END, "--output",
                    str(data / str(length)),
                ])  # fmt: skip


def found_of(run: Path, sizes: Sizes) -> dict[str, Any]:
    """Evaluate a run: its last held-out loss, and its accuracy on needles.

    The newest checkpoint answers the needles; each combination of digits and length gives one row.
    """
    from hybridtron.cli.arguments import newest_checkpoint

    rows = []
    for digits in sizes.digits:
        lengths = [multiple * max(sizes.lengths) for multiple in MULTIPLES]
        task = {"task": "passkey", "lengths": lengths, "samples": sizes.asked, "options": {"digits": digits}}
        results = answers(newest_checkpoint(run), {"tasks": [task]}, run / f"evaluation/digits{digits}", batch=44)
        kept = ("length", "value", "standard_error", "n")
        rows += [{"digits": digits, **{key: row[key] for key in kept}} for row in results if row["metric"] == "exact"]
    validated = [line["validation"] for line in read_lines(run / "metrics.jsonl") if "validation" in line]
    return {"loss": validated[-1]["1x"], "needles": rows}
