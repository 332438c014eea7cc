"""The base classes of tasks: a task generates samples (a prompt with its answer) and scores a model's answers.

A sample is a pure function of (task, options, seed, index, tokenizer, length). Samples are never truncated: TaskError
is raised if a sample can't fit the length. A task generates both training data and evaluation sets, with disjoint
seeds. Seeds below TRAINING_SEEDS are for evaluation, and `training_seed` maps each of them to a larger seed for
training. When sets are written, `write.py` also removes duplicates, and training samples that equal an evaluation
sample.

This file needs no model. An evaluation gives `sample.prompt_tokens` to a model, and passes the generated text to
`task.score`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from hybridtron.problems import Unusable

TRAINING_SEEDS = 2**32  # smaller seeds are for evaluation; this seed and larger seeds are for training
IGNORED = -100  # label of a position without a target


MAX_TOKENS = 2**28  # maximum length of a sample
MAX_OPTION = 2**20  # maximum value of an integer option


class TaskError(Unusable):
    """Raised if a task can't generate the requested sample; the message says why and suggests a remedy."""


class TextTokens(Protocol):
    """The tokenizer interface that tasks need. `encode` adds no special tokens; `digest` identifies the vocabulary."""

    @property
    def digest(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Sample:
    """One prompt and its answer.

    task, seed, index  the sample's origin: the task's name, and the seed and index from which the sample is generated
    prompt, answer     texts; for tasks on token ids, the ids in readable form
    tokens             the prompt's tokens, followed by the answer's tokens. Prompt and answer are encoded separately,
                       so that the prompt's tokens do not depend on the answer
    mask               1 for each token that counts in the loss, else 0
    outputs            strings that the metrics look for in an answer
    generate           number of tokens that an evaluation generates
    max_length         the requested length in tokens
    meta               further facts for the record, such as the needle's depth
    labels             None if each target is the next token; else the target at each position, or IGNORED
    """

    task: str
    seed: int
    index: int
    prompt: str
    answer: str
    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    outputs: tuple[str, ...]
    generate: int
    max_length: int
    meta: dict[str, Any] = field(default_factory=dict)
    labels: tuple[int, ...] | None = None

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The tokens before the first token that counts in the loss; all tokens if the sample has labels."""
        if self.labels is not None:
            return self.tokens
        return self.tokens[: self.mask.index(1)]

    @property
    def length(self) -> int:
        """Number of prompt tokens plus tokens to generate."""
        return len(self.prompt_tokens) + self.generate

    def targets(self) -> tuple[int, ...]:
        """Return the target at each position, or IGNORED for positions without a target.

        If the sample has labels, these are the targets. Otherwise a position's target is the next token, if the next
        token's mask is 1.
        """
        if self.labels is not None:
            return self.labels
        following = zip(self.tokens[1:], self.mask[1:], strict=True)
        return (*(token if learned else IGNORED for token, learned in following), IGNORED)


class Task(ABC):
    """Base class for tasks. A subclass is a frozen dataclass; its fields after `name` are the options."""

    name: str
    text: ClassVar[bool] = True  # True: samples are text and need a tokenizer. False: samples are token ids

    @property
    @abstractmethod
    def about(self) -> str:
        """A one-line description, for listings."""

    @abstractmethod
    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        """Generate the sample with this index, with at most `length` tokens. Raises TaskError if it can't fit."""

    @abstractmethod
    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Return the metrics of a generated answer by name, each from 0 to 1; the first metric is the main metric."""

    @abstractmethod
    def chance(self) -> float:
        """Return the first metric's expected value for a random guess among the possible answers."""

    def random(self, seed: int, index: int) -> Random:
        """Return the random generator for one sample. Raises TaskError for a negative seed or index."""
        if seed < 0 or index < 0:
            raise TaskError(f"{self.name}: seed={seed} index={index}: both must be at least 0", code="out-of-range")
        # Random hashes a string; the hash is the same in every process and Python version
        return Random(f"{self.name} {seed} {index}")


class TokenTask(Task):
    """Base class for tasks on token ids. Such a task has its own vocabulary, and needs no tokenizer.

    Samples are scored with teacher forcing: the model predicts each token from the correct tokens before it. Only
    positions with a target count.
    """

    text = False

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """The vocabulary's size."""

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Return the metrics of a generated answer, which has ids separated by spaces.

        `accuracy` is the fraction of the expected ids that the answer has at the same position. `exact` is 1 if this
        fraction is 1, else 0.
        """
        words = answer.split()
        wanted = sample.answer.split()
        num_right = sum(word == right for word, right in zip(words, wanted, strict=False))
        return {"accuracy": num_right / len(wanted), "exact": float(words[: len(wanted)] == wanted)}

    def score_tokens(self, sample: Sample, predicted: Sequence[int]) -> dict[str, float]:
        """Return the metrics of predictions with teacher forcing.

        `predicted` has the most probable next token at each position of the sample.
        """
        if len(predicted) != len(sample.tokens):
            raise ValueError(f"{self.name}: {len(predicted)} predictions for {len(sample.tokens)} positions")
        pairs = [
            (prediction, target)
            for prediction, target in zip(predicted, sample.targets(), strict=True)
            if self.is_scored(target)
        ]
        num_right = sum(prediction == target for prediction, target in pairs)
        return {"accuracy": num_right / len(pairs), "exact": float(num_right == len(pairs))}

    def is_scored(self, target: int) -> bool:
        """Return True if a position with this target counts in the metrics."""
        return target != IGNORED


def training_seed(seed: int) -> int:
    """Return the training seed that belongs to an evaluation seed; no evaluation set can have this seed."""
    if not 0 <= seed < TRAINING_SEEDS:
        raise TaskError(f"seed {seed}: a seed must be from 0 to {TRAINING_SEEDS - 1}", code="out-of-range")
    return TRAINING_SEEDS + seed
