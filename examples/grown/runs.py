"""What the study of grown models trains (grown.yaml) and asks: needles in filler, before and after tuning on them."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from examples.results import Part
from examples.study import answers, selected
from hybridtron.sweep.grid import SweepRun
from hybridtron.train.records import read_lines

HERE = Path(__file__).parent
END = "<|endoftext|>"
TUNED = "-needles"  # how the names of tuned runs end
MULTIPLES = (1, 2)  # of the longest row, that are asked


@dataclass(frozen=True)
class Sizes:
    """How much is done: the real study, or one of a minute."""

    settings: tuple[str, ...] = ()
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


def part_of(sizes: Sizes, runs: Path, data: Path) -> Part:
    """The runs, on the text and on samples of a folder, and what is asked of each."""
    text = (f"data.path={data / 'text'}",)
    mixed = (f"phases.1.data.mixture.length{length}.path={data / str(length)}" for length in sizes.lengths)
    samples = (f"data.path={data / str(min(sizes.lengths))}", *mixed)

    def more(run: SweepRun) -> tuple[str, ...] | None:
        if not run.variant.endswith(TUNED):
            return (*sizes.settings, *text)
        settings = (text for text in sizes.settings if not text.startswith("model."))  # that of the checkpoint
        return (*settings, *sizes.tuning, *samples)

    sweep, folder = selected(HERE / "grown.yaml", runs, more)
    asked = {name: getattr(sizes, name) for name in ("digits", "lengths", "training", "vocab_size", "asked")}
    return Part(sweep, folder, lambda _, path: found_of(path, sizes), asked)


def write_samples(sizes: Sizes, data: Path) -> None:
    """The text and its tokenizer, and for each length a folder in which every sample, with its end, is one row."""
    from hybridtron.cli.prepare_data import main as prepare
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
    """The held-out loss of a run at its end, and rows of what its newest checkpoint finds, by digits and length."""
    from hybridtron.cli.given import newest_checkpoint

    rows = []
    for digits in sizes.digits:
        lengths = [multiple * max(sizes.lengths) for multiple in MULTIPLES]
        task = {"task": "passkey", "lengths": lengths, "samples": sizes.asked, "options": {"digits": digits}}
        found = answers(newest_checkpoint(run), {"tasks": [task]}, run / f"evaluation/digits{digits}", batch=44)
        kept = ("length", "value", "standard_error", "n")
        rows += [{"digits": digits, **{key: row[key] for key in kept}} for row in found if row["metric"] == "exact"]
    validated = [line["validation"] for line in read_lines(run / "metrics.jsonl") if "validation" in line]
    return {"loss": validated[-1]["1x"], "needles": rows}
