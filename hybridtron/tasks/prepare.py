"""Writes samples of tasks on token ids as a prepared folder: tokenized documents with loss masks, for training.

    train/TASK-LENGTH        samples with the seed `training_seed(seed)`
    validation/TASK-LENGTH   samples with the seed `seed`, which an evaluation with this seed generates too

A document is a sample's tokens, followed by eos, which does not count in the loss. Token eos has the first id that no
task uses. The samples for one task and length are distinct, also between the two splits. In the folder's tokenizer, a
token's text is its id: "17" is token 17.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare.writer import write_folder
from hybridtron.tasks.base import Sample, TaskError, TokenTask, training_seed
from hybridtron.tasks.tokens import ByteTokens
from hybridtron.tasks.write import WrittenSet, distinct

EOS = "<eos>"
Moved = Callable[[int, int], None]


def prepare(wanted: WrittenSet, folder: Path, moved: Moved) -> TokenFolder:
    """Write a prepared folder; `wanted.evaluation` is the number of held-out samples per task and length.

    To show progress, `moved` is called before each sample with two numbers: the sample's number, counted from 1, and
    the total number of samples. Raises TaskError if a task can't be prepared.
    """
    tasks = token_tasks(wanted)
    eos = max(task.num_tokens for task in tasks)
    done = itertools.count(1)
    total = len(tasks) * len(wanted.lengths) * (wanted.evaluation + wanted.training)
    splits: dict[str, dict[str, Iterator[np.ndarray]]] = {"validation": {}, "train": {}}
    masks: dict[str, dict[str, Iterator[np.ndarray]]] = {"validation": {}, "train": {}}
    for task, length in itertools.product(tasks, wanted.lengths):
        seen: set[bytes] = set()
        for split, seed, count in (
            ("validation", wanted.seed, wanted.evaluation),
            ("train", training_seed(wanted.seed), wanted.training),
        ):
            samples = _reporting(
                distinct(task, seed, count, ByteTokens(), length, seen), lambda: moved(next(done), total)
            )
            # write_folder reads a sample's tokens, then its mask, so tee buffers a single sample
            token_samples, mask_samples = itertools.tee(samples)
            splits[split][f"{task.name}-{length}"] = (np.array(sample.tokens) for sample in token_samples)
            masks[split][f"{task.name}-{length}"] = (_mask(sample) for sample in mask_samples)
    origin = {"corpus": "tasks", "seed": wanted.seed, "tasks": json.dumps(wanted.about()["tasks"])}
    return write_folder(folder, splits, _tokenizer(eos), eos + 1, eos, origin, masks=masks)


def token_tasks(wanted: WrittenSet) -> Sequence[TokenTask]:
    """Check that all tasks of the set can be prepared, and return them.

    Raises TaskError in three cases: a task is in text, a task's targets are not next tokens, or no training samples are
    requested.
    """
    tasks = []
    for task in wanted.tasks:
        if not isinstance(task, TokenTask):
            cure = "run `hybridtron tasks write`, then `hybridtron data prepare --learn completion`"
            raise TaskError(f"{task.name} is a task in text, not on token ids: {cure}", code="unsupported")
        if task.sample(wanted.seed, 0, ByteTokens(), wanted.lengths[0]).labels is not None:
            cure = "set follows=true, which puts each value after its key"
            raise TaskError(
                f"{task.name}: the task's targets are not next tokens, as a prepared folder requires: {cure}",
                code="unsupported",
            )
        tasks.append(task)
    if not wanted.training:
        raise TaskError("--training 0: must be at least 1 for a prepared folder", code="out-of-range")
    return tasks


def _mask(sample: Sample) -> np.ndarray:
    """Return a sample's loss mask, with a last entry for eos, which does not count in the loss."""
    return np.array([*sample.mask, 0], dtype=np.bool_)


def _reporting(samples: Iterator[Sample], report: Callable[[], None]) -> Iterator[Sample]:
    """Yield the samples unchanged, and call `report` before each sample."""
    for sample in samples:
        report()
        yield sample


def _tokenizer(eos: int) -> str:
    """Return the content of a tokenizer.json: a token's text is its id, and tokens are separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(eos)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer.to_str()
