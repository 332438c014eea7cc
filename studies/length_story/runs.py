"""Training runs of the length story (language.yaml, copying.yaml), their measurements, and the copying data.

python -m studies.length_story.runs data      writes the strings of recipe=copying_45m into data/strings
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SEED, SweepRun
from hybridtron.tasks.base import Sample, training_seed
from hybridtron.tasks.copying import FIXED, PADDING, SYMBOLS, Copying
from hybridtron.tasks.tokens import ByteTokens
from studies.long_text import Curve, long_text_losses
from studies.results import Part
from studies.study import answers, selected

HERE = Path(__file__).parent
FURTHER = ("zero-small", "passing-small")  # a copying experiment with one seed
END = len(SYMBOLS)  # the token that ends a row: the next number after the task's vocabulary
VALIDATION_ROWS = 200


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real story, or for a quick one that takes seconds."""

    seeds: tuple[str, ...] = ("1", "2", "3")
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # all, or these with further settings
    multiples: int = 16  # length of evaluated rows, in training contexts
    rows: int = 1024  # evaluated rows, spread evenly over the held-out text
    copy_lengths: tuple[int, int] = (10, 20)  # shortest and longest string of training
    copy_test: tuple[int, ...] = (10, 15, 20, 30, 40, 60)  # lengths that are tested
    copy_tokens: int = 127  # length of a row of packed strings, without the end of document
    copy_padded: bool = False  # a row has one string, with padding before it: it ends with the copy
    copy_rows: int = 70_400
    copy_samples: int = 128  # samples of each tested length


STORY = Sizes()
PAPER = Sizes(copy_lengths=(50, 100), copy_tokens=1023, copy_rows=150_000)  # a million strings, for copying_45m
QUICK_COPYING = ("phases.0.tokens=480", "phases.0.seq_len=24", "phases.0.global_batch=4", "phases.0.micro_batch=4")
QUICK_COPYING += ("run.eval_tokens=256",)
QUICK = Sizes(
    seeds=("1",),
    variants={
        "language/base": (
            "phases.0.tokens=4K", "model.width=32", "data=folder", "model.vocab_size=32", "run.eval_tokens=256",
        ),
        "language/passing": ("phases.0.tokens=${steps:2}", "run.eval_tokens=256"),
        "copying/zero": QUICK_COPYING,
        "copying/passing": QUICK_COPYING,
    },
    multiples=4,
    rows=4,
    copy_lengths=(5, 10),
    copy_test=(8, 10, 16),
    copy_tokens=23,
    copy_rows=400,
    copy_samples=4,
)  # fmt: skip


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STORY


def part_of(part: str, sizes: Sizes, root: Path) -> Part:
    """Return the part `language` or `copying`: its runs with their data, and its measurement."""

    def more(run: SweepRun) -> tuple[str, ...] | None:
        name = f"{part}/{run.variant}"
        seeds = sizes.seeds
        if run.variant in FURTHER:
            seeds = seeds[:1]
        if (sizes.variants and name not in sizes.variants) or run.values[SEED] not in seeds:
            return None
        added = sizes.variants.get(name, ())
        if "data=folder" in (*run.settings, *added):
            return (*added, f"data.path={root / 'strings'}")
        return added

    sweep, folder = selected(HERE / f"{part}.yaml", root / part, more)
    if part == "language":
        asked = {"multiples": sizes.multiples, "rows": sizes.rows}
        return Part(sweep, folder, lambda _, path: of_text(path, sizes), asked)
    asked: dict[str, Any] = {
        "lengths": sizes.copy_lengths, "tokens": sizes.copy_tokens, "rows": sizes.copy_rows,
        "test": sizes.copy_test, "samples": sizes.copy_samples,
    }  # fmt: skip
    if sizes.copy_padded:
        asked["padded"] = True
    return Part(sweep, folder, lambda _, path: copy_accuracy(path, sizes), asked)


def write_copying_data(sizes: Sizes, root: Path) -> None:
    """Write a prepared folder in which every document is one row: packed strings, or one string after padding.

    The loss mask leaves out the end of each row. A folder that exists is kept.
    """
    import numpy as np
    from tokenizers import Tokenizer, models

    from hybridtron.data.prepare.writer import write_folder

    if (root / "strings").exists():
        return
    (shortest, longest) = sizes.copy_lengths
    length = sizes.copy_tokens
    task = Copying(shortest=shortest, longest=longest, packed=not sizes.copy_padded)
    seeds = {"train": 0, "validation": 1}

    def rows(split: str) -> Iterator[Sample]:
        count = sizes.copy_rows if split == "train" else VALIDATION_ROWS
        return (task.sample(training_seed(seeds[split]), index, ByteTokens(), length) for index in range(count))

    def before(row: Sample) -> int:
        return length - len(row.tokens)

    tokens = {split: {"copying": ([PADDING] * before(row) + [*row.tokens] for row in rows(split))} for split in seeds}
    masks = {
        split: {"copying": (np.array([0] * before(row) + [*row.mask, 0], np.uint8) for row in rows(split))}
        for split in seeds
    }
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(END + 1)}, unk_token="0")).to_str()
    origin = {"corpus": "copying", "shortest": shortest, "longest": longest}
    write_folder(root / "strings", tokens, tokenizer, END + 1, END, origin, masks=masks)


def of_text(run: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure perplexity by position, over rows many times as long as those of training."""
    losses = long_text_losses(run, sizes.multiples, sizes.rows)
    return asdict(Curve.of(losses, len(losses) // sizes.multiples))


def copy_accuracy(run: Path, sizes: Sizes) -> dict[str, float]:
    """Measure the accuracy of copying at each string length.

    It is the share of letters that the model finds likeliest, given the right letters before them.
    """
    from hybridtron.cli.arguments import newest_checkpoint

    lengths = [2 * letters + FIXED for letters in sizes.copy_test]
    asked = {"samples": sizes.copy_samples, "tasks": [{"task": "copying", "lengths": lengths}]}
    rows = answers(newest_checkpoint(run), asked, run / "evaluation/copying")
    return {str((row["length"] - FIXED) // 2): row["value"] for row in rows if row["metric"] == "accuracy"}


if __name__ == "__main__":
    write_copying_data(PAPER, Path(sys.argv[1]))
