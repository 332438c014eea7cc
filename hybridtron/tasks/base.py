"""The base classes of tasks: pure functions from (seed, index, tokenizer, length) to a sample, with metrics.

A task generates both training data and evaluation sets, with disjoint seeds: those below TRAINING_SEEDS are for
evaluation, and `training_seed` maps them to larger ones. `write.py` also removes duplicates within a set, and training
samples that are in the evaluation set. Samples are never truncated: one that doesn't fit its length is a TaskError.
This file needs no model: a model reads `sample.prompt_tokens`, and `task.score` scores its answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from hybridtron.problems import Unusable

TRAINING_SEEDS = 2**32
IGNORED = -100  # label of a position without a target


MOST_TOKENS = 2**28  # maximum length of a sample
MOST_OPTION = 2**20  # maximum of an option that is an integer


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

    prompt, answer  texts; for tasks on token ids, the ids in readable form
    tokens          the prompt's tokens, then the answer's; encoded separately, so the prompt is the same without answer
    mask            1 for each token that is learned and scored, else 0
    outputs         strings that the metrics look for in an answer
    generate        number of tokens that an evaluation generates
    max_length      the requested length in tokens
    labels          None if each target is the next token; otherwise the target at each position, or IGNORED
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
        """The tokens before the first learned one; all tokens if the sample has labels."""
        if self.labels is not None:
            return self.tokens
        return self.tokens[: self.mask.index(1)]

    @property
    def length(self) -> int:
        """Number of prompt tokens plus tokens to generate."""
        return len(self.prompt_tokens) + self.generate

    def targets(self) -> tuple[int, ...]:
        """Return the target at each position: its label, or the next token if that is learned, else IGNORED."""
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
        """Generate sample number `index`, of at most `length` tokens. Raises TaskError if it can't fit."""

    @abstractmethod
    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Score a generated continuation. Returns metrics by name, each from 0 to 1; the first is the main one."""

    @abstractmethod
    def chance(self) -> float:
        """Return the first metric's expected value for a random guess among the possible answers."""

    def random(self, seed: int, index: int) -> Random:
        """Return the random generator for one sample. Raises TaskError for a negative seed or index."""
        if seed < 0 or index < 0:
            raise TaskError(f"{self.name}: seed={seed} index={index}: both count from 0", code="out-of-range")
        return Random(f"{self.name} {seed} {index}")  # a string seed is hashed: the same in every process and version


class TokenTask(Task):
    """Base class for tasks on token ids from a vocabulary of their own, scored teacher-forced at learned positions."""

    text = False

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """The vocabulary's size."""

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Score a generated continuation, given as ids separated by spaces.

        `accuracy` is the fraction of right ids, `exact` is 1 if all are right.
        """
        words = answer.split()
        wanted = sample.answer.split()
        num_right = sum(word == right for word, right in zip(words, wanted, strict=False))
        return {"accuracy": num_right / len(wanted), "exact": float(words[: len(wanted)] == wanted)}

    def score_tokens(self, sample: Sample, predicted: Sequence[int]) -> dict[str, float]:
        """Score teacher-forced predictions: `predicted` has the most probable next token at each position."""
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
        """Check that a position with this target counts for the metrics."""
        return target != IGNORED


def training_seed(seed: int) -> int:
    """Map an evaluation seed to a training seed, which no evaluation set can have."""
    if not 0 <= seed < TRAINING_SEEDS:
        raise TaskError(f"seed {seed}: a seed is from 0 to {TRAINING_SEEDS - 1}", code="out-of-range")
    return TRAINING_SEEDS + seed
