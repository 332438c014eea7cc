"""What the length story trains (language.yaml, copying.yaml) and measures, and the strings that are copied.

python -m examples.length_story.runs data      the strings of recipe=copying_45m, in data/strings
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.long_text import Curve, long_text_losses
from examples.results import Part
from examples.study import answers, selected
from hybridtron.sweep.grid import SEED, SweepRun
from hybridtron.tasks.base import Sample, training_seed
from hybridtron.tasks.copying import FIXED, SYMBOLS, Copying
from hybridtron.tasks.tokens import ByteTokens

HERE = Path(__file__).parent
FURTHER = ("zero-small", "passing-small")  # of copying: an experiment of one seed
END = len(SYMBOLS)  # of a row, behind the task's own vocabulary
VALIDATION_ROWS = 200


@dataclass(frozen=True)
class Sizes:
    """How much is done: the real story, or one of seconds."""

    seeds: tuple[str, ...] = ("1", "2", "3")
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # all, or these with further settings
    multiples: int = 16  # of the training context, that are read
    rows: int = 1024  # of held-out text that are read, evenly over all of it
    copy_lengths: tuple[int, int] = (10, 20)  # of the strings trained on
    copy_test: tuple[int, ...] = (10, 15, 20, 30, 40, 60)  # lengths that are tested
    copy_tokens: int = 127  # of a row of packed strings, without the end of document
    copy_rows: int = 70_400
    copy_samples: int = 128  # of each length that is tested


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


def part_of(part: str, sizes: Sizes, root: Path) -> Part:
    """The runs of `language` or of `copying`, at these sizes, and what is measured on them."""

    def more(run: SweepRun) -> tuple[str, ...] | None:
        added = sizes.variants.get(f"{part}/{run.variant}", None if sizes.variants else ())
        seeds = sizes.seeds[:1] if run.variant in FURTHER else sizes.seeds
        if added is None or run.values[SEED] not in seeds:
            return None
        return (*added, f"data.path={root / 'strings'}") if "data=folder" in (*run.settings, *added) else added

    sweep, folder = selected(HERE / f"{part}.yaml", root / part, more)
    if part == "language":
        asked = {"multiples": sizes.multiples, "rows": sizes.rows}
        return Part(sweep, folder, lambda _, path: of_text(path, sizes), asked)
    asked = {
        "lengths": sizes.copy_lengths, "tokens": sizes.copy_tokens, "rows": sizes.copy_rows,
        "test": sizes.copy_test, "samples": sizes.copy_samples,
    }  # fmt: skip
    return Part(sweep, folder, lambda _, path: copy_accuracy(path, sizes), asked)


def write_copying_data(sizes: Sizes, root: Path) -> None:
    """Prepared tokens in which every document is a row of packed strings: with its end, which is not learned."""
    import numpy as np
    from tokenizers import Tokenizer, models

    from hybridtron.data.prepare.writer import write_folder

    if (root / "strings").exists():
        return
    (shortest, longest) = sizes.copy_lengths
    length = sizes.copy_tokens
    task = Copying(shortest=shortest, longest=longest, packed=True)
    seeds = {"train": 0, "validation": 1}

    def rows(split: str) -> Iterator[Sample]:
        count = sizes.copy_rows if split == "train" else VALIDATION_ROWS
        return (task.sample(training_seed(seeds[split]), index, ByteTokens(), length) for index in range(count))

    tokens = {split: {"copying": (row.tokens for row in rows(split))} for split in seeds}
    masks = {split: {"copying": (np.array([*row.mask, 0], np.uint8) for row in rows(split))} for split in seeds}
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(END + 1)}, unk_token="0")).to_str()
    origin = {"corpus": "copying", "shortest": shortest, "longest": longest}
    write_folder(root / "strings", tokens, tokenizer, END + 1, END, origin, masks=masks)


def of_text(run: Path, sizes: Sizes) -> dict[str, Any]:
    """Perplexity by position, up to many times as far as the rows of training reach."""
    losses = long_text_losses(run, sizes.multiples, sizes.rows)
    return asdict(Curve.of(losses, len(losses) // sizes.multiples))


def copy_accuracy(run: Path, sizes: Sizes) -> dict[str, float]:
    """By length of the string: the share of its copy's letters that are the likeliest, given the right ones before."""
    from hybridtron.cli.given import newest_checkpoint

    lengths = [2 * letters + FIXED for letters in sizes.copy_test]
    asked = {"samples": sizes.copy_samples, "tasks": [{"task": "copying", "lengths": lengths}]}
    rows = answers(newest_checkpoint(run), asked, run / "evaluation/copying")
    return {str((row["length"] - FIXED) // 2): row["value"] for row in rows if row["metric"] == "accuracy"}


if __name__ == "__main__":
    write_copying_data(PAPER, Path(sys.argv[1]))
