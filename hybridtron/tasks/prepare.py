"""Writes tasks on token ids as a prepared folder with loss masks, for training by a recipe.

    train/TASK-LENGTH        samples from the training seed
    validation/TASK-LENGTH   samples from the seed itself, the same that an evaluation with this seed has

Each sample is a document: its tokens, followed by an eos that is not learned and whose id is the first beyond all the
tasks' vocabularies. Samples are distinct. The folder's tokenizer maps ids to words: "17" is token 17.
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

    `moved` is called with (samples written, samples in total). Raises TaskError for tasks that can't be prepared.
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
            samples = _heard(distinct(task, seed, count, ByteTokens(), length, seen), lambda: moved(next(done), total))
            # tokens and masks are read alternately, so tee buffers one sample
            token_samples, mask_samples = itertools.tee(samples)
            splits[split][f"{task.name}-{length}"] = (np.array(sample.tokens) for sample in token_samples)
            masks[split][f"{task.name}-{length}"] = (_mask(sample) for sample in mask_samples)
    origin = {"corpus": "tasks", "seed": wanted.seed, "tasks": json.dumps(wanted.about()["tasks"])}
    return write_folder(folder, splits, _tokenizer(eos), eos + 1, eos, origin, masks=masks)


def token_tasks(wanted: WrittenSet) -> Sequence[TokenTask]:
    """Return the tasks, after checking that all can be prepared.

    Raises TaskError for a task in text, for one whose targets are not the next token, or without training samples.
    """
    tasks = []
    for task in wanted.tasks:
        if not isinstance(task, TokenTask):
            cure = "`hybridtron tasks write` and `hybridtron data prepare --learn completion` prepare a task in text"
            raise TaskError(f"{task.name} is in text: {cure}", code="unsupported")
        if task.sample(wanted.seed, 0, ByteTokens(), wanted.lengths[0]).labels is not None:
            cure = "follows=true puts each value behind its key"
            raise TaskError(
                f"{task.name}: its targets are not the next token, which prepared tokens are: {cure}",
                code="unsupported",
            )
        tasks.append(task)
    if not wanted.training:
        raise TaskError("--training 0: a prepared folder has training samples", code="out-of-range")
    return tasks


def _mask(sample: Sample) -> np.ndarray:
    """Return a sample's loss mask, with an entry for the eos, which is not learned."""
    return np.array([*sample.mask, 0], dtype=np.bool_)


def _heard(samples: Iterator[Sample], made: Callable[[], None]) -> Iterator[Sample]:
    """Pass samples through, calling `made` before each, to report progress."""
    for sample in samples:
        made()
        yield sample


def _tokenizer(eos: int) -> str:
    """Return a tokenizer.json whose words are the ids below `eos`, separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(eos)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer.to_str()
