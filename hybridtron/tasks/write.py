"""Writes sets of samples as JSON lines: a file for each split, task and length, and set.json with the settings.

    DIR/set.json                          tokenizer's digest, seed, sample counts, each task's options
    DIR/evaluation/passkey-1024.jsonl
    DIR/training/passkey-1024.jsonl

A line is a sample. For a task in text, the line has `prompt`, `completion` and the fields that an evaluation needs. For
a task on token ids, the line has `tokens` and `mask`; if the targets are not the next tokens, it has `labels` instead
of `mask`. The samples in a file are distinct, and no training sample equals an evaluation sample.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.storage.durable import temporary_of
from hybridtron.tasks.base import Sample, Task, TaskError, TextTokens, training_seed
from hybridtron.tasks.options import options_of

TRIES = 20  # maximum number of draws for each requested sample; a draw that repeats an earlier sample is not written


@dataclass(frozen=True)
class WrittenSet:
    """A requested set of samples.

    `evaluation` and `training` say how many samples these two splits have for each task and length.
    """

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    evaluation: int
    training: int
    seed: int
    tokenizer: TextTokens

    def about(self) -> dict[str, Any]:
        """Return set.json's contents."""
        return {
            "tokenizer": self.tokenizer.digest,
            "seed": self.seed,
            "lengths": self.lengths,
            "evaluation": self.evaluation,
            "training": self.training,
            "tasks": {task.name: options_of(task) for task in self.tasks},
        }


def distinct(
    task: Task, seed: int, count: int, tokenizer: TextTokens, length: int, seen: set[bytes]
) -> Iterator[Sample]:
    """Yield `count` samples whose identities are not in `seen`, and add their identities to `seen`.

    Raises TaskError if TRIES * count draws do not give `count` distinct samples.
    """
    num_distinct = 0
    index = 0
    while num_distinct < count:
        if index >= TRIES * count:
            message = f"{task.name}: a length of {length} gives {num_distinct} distinct samples in {index} tries"
            raise TaskError(f"{message}; request fewer than {count} samples", code="does-not-fit")
        sample = task.sample(seed, index, tokenizer, length)
        index += 1
        if (digest := identity(sample)) not in seen:
            seen.add(digest)
            num_distinct += 1
            yield sample


def identity(sample: Sample) -> bytes:
    """Return a digest of a sample's tokens and labels; samples with equal digests are duplicates."""
    return hashlib.blake2b(repr((sample.tokens, sample.labels)).encode(), digest_size=16).digest()


def row(sample: Sample, text: bool) -> dict[str, Any]:
    """Return a sample's fields for a JSON line; `text` is True for a task in text, False for token ids."""
    about = {"task": sample.task, "seed": sample.seed, "index": sample.index}
    sizes = {"length": sample.length, "generate": sample.generate, "max_length": sample.max_length}
    if text:
        prefix = sample.meta.get("answer_prefix", "")
        parts = {"prompt": sample.prompt, "completion": sample.answer}
        parts |= {"input": sample.prompt.removesuffix(prefix), "answer_prefix": prefix, "outputs": sample.outputs}
    else:
        if sample.labels is None:
            learned = {"mask": sample.mask}
        else:
            learned = {"labels": sample.labels}
        parts = {"tokens": sample.tokens, **learned}
    return about | parts | sizes | {"meta": sample.meta}


def write(wanted: WrittenSet, folder: Path, moved: Callable[[int, int], None]) -> list[Path]:
    """Write a set's files and return their paths. The folder appears atomically, when all files are complete.

    `moved` is called before each pair of task and length, with two counts: pairs done, and all pairs.
    """
    temporary = temporary_of(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    splits = {"evaluation": (wanted.seed, wanted.evaluation), "training": (training_seed(wanted.seed), wanted.training)}
    files = [(task, length) for task in wanted.tasks for length in wanted.lengths]
    try:
        temporary.mkdir(parents=True)
        names = []
        for done, (task, length) in enumerate(files):
            moved(done, len(files))
            seen: set[bytes] = set()
            for split, (seed, count) in splits.items():
                samples = distinct(task, seed, count, wanted.tokenizer, length, seen)
                name = Path(split, f"{task.name}-{length}.jsonl")
                if count:
                    _write_rows(temporary / name, samples, task.text)
                    names.append(folder / name)
        (temporary / "set.json").write_text(json.dumps(wanted.about(), indent=2) + "\n")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return names


def _write_rows(file: Path, samples: Iterator[Sample], text: bool) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("w") as opened:
        for sample in samples:
            opened.write(json.dumps(row(sample, text)) + "\n")
