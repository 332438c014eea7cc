"""Sets of samples as files: one a task and length, for evaluation and for training, and what they were made with.

    DIR/set.json                          tokenizer's digest, seed, numbers of samples, options of each task
    DIR/evaluation/passkey-1024.jsonl
    DIR/training/passkey-1024.jsonl

A line of a text task has `prompt` and `completion`, and what an evaluation needs. One of a task on token ids has
`tokens`, and `mask`, or `labels` where a target is not the next token. No sample is in a file twice, and none of the
evaluation set is in the training set.
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

TRIES = 20  # samples that are drawn for one that is new


@dataclass(frozen=True)
class WrittenSet:
    """What is written: for each task and length `evaluation` and `training` samples."""

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    evaluation: int
    training: int
    seed: int
    tokenizer: TextTokens

    def about(self) -> dict[str, Any]:
        """What set.json holds."""
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
    """Samples that are not among the seen; TaskError where the task has too few of them."""
    found, index = 0, 0
    while found < count:
        if index >= TRIES * count:
            message = f"{task.name}: a length of {length} gives {found} distinct samples in {index} tries"
            raise TaskError(f"{message}, and {count} are asked for")
        sample = task.sample(seed, index, tokenizer, length)
        index += 1
        if (digest := identity(sample)) not in seen:
            seen.add(digest)
            found += 1
            yield sample


def identity(sample: Sample) -> bytes:
    """The same for samples that a model can't distinguish."""
    return hashlib.blake2b(repr((sample.tokens, sample.labels)).encode(), digest_size=16).digest()


def row(sample: Sample, text: bool) -> dict[str, Any]:
    """A sample as a line of JSON."""
    about = {"task": sample.task, "seed": sample.seed, "index": sample.index}
    sizes = {"length": sample.length, "generate": sample.generate, "max_length": sample.max_length}
    if text:
        prefix = sample.meta.get("answer_prefix", "")
        parts = {"prompt": sample.prompt, "completion": sample.answer}
        parts |= {"input": sample.prompt.removesuffix(prefix), "answer_prefix": prefix, "outputs": sample.outputs}
    else:
        learned = {"mask": sample.mask} if sample.labels is None else {"labels": sample.labels}
        parts = {"tokens": sample.tokens, **learned}
    return about | parts | sizes | {"meta": sample.meta}


def write(wanted: WrittenSet, folder: Path, moved: Callable[[int, int], None]) -> list[Path]:
    """The files, in a folder that appears when all of them are complete."""
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
