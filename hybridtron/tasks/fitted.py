"""Base class for tasks that fit their text to a length by adding units, such as lines of noise or an essay's words.

A sample's length counts the tokens in the prompt and the tokens to generate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from hybridtron.tasks.base import Sample, Task, TaskError, TextTokens
from hybridtron.tasks.fitting import TooShort, most_units, shrink


@dataclass(frozen=True)
class TaskText:
    """A sample's texts, before tokenization.

    question       the context and the question
    answer_prefix  the answer's beginning, which is part of the prompt: the prompt is `question` + `answer_prefix`
    answer         text that follows the prompt in training data
    outputs        strings that metrics look for in a generated answer
    meta           further facts for the sample's record
    """

    question: str
    answer_prefix: str
    answer: str
    outputs: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class FittedTask(Task):
    """A task whose samples have as many units as fit their length.

    A search with one sample finds how many units fit. Every other sample first gets this number of units, which is then
    reduced until the sample fits.
    """

    generate: ClassVar[int]  # number of tokens that an evaluation generates
    tries: ClassVar[int] = 1  # maximum number of draws of a sample; a draw fails if even the fewest units are too long

    @abstractmethod
    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        """Generate the texts for sample `index` with this number of units; `length` is the maximum in tokens."""

    @abstractmethod
    def steps(self, length: int) -> tuple[int, int]:
        """Return the minimum number of units, and the number of units to add in a step."""

    def most(self, size: Callable[[int], int], tokenizer: TextTokens, length: int) -> int:
        """Return how many units are tried first for a sample.

        `size` returns the sample's length in tokens, given a unit count. By default `size` is not used: the result is
        the unit count that a search with another sample has found.
        """
        return fitted(self, tokenizer, length)

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self.check(length)
        self.random(seed, index)  # raises TaskError for a negative seed or index
        for attempt in range(self.tries):
            try:
                return self._sample(seed, index, tokenizer, length, f"{self.name} {seed} {index} {attempt}")
            except TooShort:
                if attempt == self.tries - 1:
                    raise
        raise AssertionError(self.tries)

    def _sample(self, seed: int, index: int, tokenizer: TextTokens, length: int, random_seed: str) -> Sample:
        def made(units: int) -> tuple[TaskText, list[int], list[int]]:
            text = self.text_of(Random(random_seed), units, index, length)
            return text, tokenizer.encode(text.question + text.answer_prefix), tokenizer.encode(text.answer)

        def size(units: int) -> int:
            _, prompt, answer = made(units)
            return len(prompt) + max(self.generate, len(answer))

        fewest, step = self.steps(length)
        units = shrink(size, length, self.most(size, tokenizer, length), fewest, step, self.name)
        text, prompt, answer = made(units)
        return Sample(
            self.name,
            seed,
            index,
            text.question + text.answer_prefix,
            text.answer,
            (*prompt, *answer),
            (0,) * len(prompt) + (1,) * len(answer),
            text.outputs,
            generate=max(self.generate, len(answer)),
            max_length=length,
            meta={"answer_prefix": text.answer_prefix, "units": units, **text.meta},
        )

    def check(self, length: int) -> None:
        """Raise TaskError if the options or the length are invalid."""
        if length <= self.generate:
            raise TaskError(
                f"{self.name}: a length of {length} is too short: {self.generate} tokens of it are for the answer",
                code="does-not-fit",
            )


@lru_cache(1024)
def fitted(task: FittedTask, tokenizer: TextTokens, length: int) -> int:
    """Return the number of units with which one random sample fits the length; cached by task, tokenizer and length."""

    def size(units: int) -> int:
        text = task.text_of(Random(f"{task.name} fitting"), units, 0, length)
        answer = len(tokenizer.encode(text.answer))
        return len(tokenizer.encode(text.question + text.answer_prefix)) + max(task.generate, answer)

    return most_units(size, length, *task.steps(length))
