"""What a task is: a pure function of (seed, index, tokenizer, length) to a sample, and the metrics of an answer.

The same task makes training data and evaluation sets. Their seeds are disjoint: seeds below TRAINING_SEEDS are for
evaluation, `training_seed` maps to those from there on. `write.py` also removes duplicates, within a set and from the
training set what the evaluation set has. A sample is never truncated: what doesn't fit is a TaskError.
Nothing here knows a model; `sample.prompt_tokens` is what a model reads, `task.score` judges what it wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from hybridtron.problems import Unusable

TRAINING_SEEDS = 2**32
IGNORED = -100  # the label of a position that predicts nothing


MOST_TOKENS = 2**28  # of a sample
MOST_OPTION = 2**20  # an option that is a number


class TaskError(Unusable):
    """A task that can't give the sample that is asked for: why, and what would work."""


class TextTokens(Protocol):
    """A vocabulary as tasks need it: without special tokens."""

    @property
    def digest(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Sample:
    """One prompt and its answer.

    prompt, answer  texts; of tasks on token ids, their readable form
    tokens          the prompt's, then the answer's; encoded separately: the prompt is the same without an answer
    mask            1 for each token that is learned and scored
    outputs         what the metrics look for
    generate        tokens that an evaluation generates
    max_length      the length that was asked for
    labels          where a target is not the next token: the target at each position, or IGNORED
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
        """What comes before the first token that is learned; all of them where a target is not the next token."""
        return self.tokens if self.labels is not None else self.tokens[: self.mask.index(1)]

    @property
    def length(self) -> int:
        """Tokens of the prompt and to generate."""
        return len(self.prompt_tokens) + self.generate

    def targets(self) -> tuple[int, ...]:
        """What is predicted at each position: the next token where it is masked in, or IGNORED."""
        if self.labels is not None:
            return self.labels
        following = zip(self.tokens[1:], self.mask[1:], strict=True)
        return (*(token if learned else IGNORED for token, learned in following), IGNORED)


class Task(ABC):
    """A registered task. A subclass is a frozen dataclass; its fields after `name` are the options."""

    name: str
    text: ClassVar[bool] = True  # whether it needs a tokenizer; otherwise it is made of token ids

    @property
    @abstractmethod
    def about(self) -> str:
        """One line for lists."""

    @abstractmethod
    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        """Sample number `index`. TaskError where the length can't fit it."""

    @abstractmethod
    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Each metric of a generated continuation, from 0 to 1."""

    @abstractmethod
    def chance(self) -> float:
        """What a random guess among possible answers scores by the first metric."""

    def random(self, seed: int, index: int) -> Random:
        """The random numbers of one sample."""
        if seed < 0 or index < 0:
            raise TaskError(f"{self.name}: seed={seed} index={index}: both count from 0")
        return Random(f"{self.name} {seed} {index}")  # a string is hashed: the same in every process and version


class TokenTask(Task):
    """A task on token ids of its own vocabulary, scored at each learned position (teacher-forced)."""

    text = False

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """The size of its vocabulary."""

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Of a generated continuation: its ids, separated by spaces."""
        words = answer.split()
        wanted = sample.answer.split()
        same = sum(word == right for word, right in zip(words, wanted, strict=False))
        return {"accuracy": same / len(wanted), "exact": float(words[: len(wanted)] == wanted)}

    def score_tokens(self, sample: Sample, predicted: Sequence[int]) -> dict[str, float]:
        """Of the most probable token at each position of `sample.tokens`."""
        if len(predicted) != len(sample.tokens):
            raise ValueError(f"{self.name}: {len(predicted)} predictions for {len(sample.tokens)} positions")
        pairs = [(p, t) for p, t in zip(predicted, sample.targets(), strict=True) if self.is_scored(t)]
        same = sum(p == t for p, t in pairs)
        return {"accuracy": same / len(pairs), "exact": float(same == len(pairs))}

    def is_scored(self, target: int) -> bool:
        """Whether a position with this target counts."""
        return target != IGNORED


def training_seed(seed: int) -> int:
    """A seed that no evaluation set has."""
    if not 0 <= seed < TRAINING_SEEDS:
        raise TaskError(f"seed {seed}: a seed is from 0 to {TRAINING_SEEDS - 1}")
    return TRAINING_SEEDS + seed


def plural(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {what}{'' if count == 1 else 's'}"
