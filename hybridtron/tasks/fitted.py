"""Base class for tasks that fit their text to a length by adding units, such as lines of noise or an essay's words.

A sample's length is the number of prompt tokens plus tokens to generate, without special tokens.
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

    The prompt is `question` + `answer_prefix`; in training `answer` follows it. Metrics look for `outputs`.
    """

    question: str
    answer_prefix: str
    answer: str
    outputs: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class FittedTask(Task):
    """A task whose samples have as many units as fit their length.

    A search with one sample finds how many fit. Other samples start with it, and lose units until they fit.
    """

    generate: ClassVar[int]
    tries: ClassVar[int] = 1  # number of times that a sample is drawn if it is too long with the fewest units

    @abstractmethod
    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        """Generate sample `index` with this number of units; `length` is the sample's maximum in tokens."""

    @abstractmethod
    def steps(self, length: int) -> tuple[int, int]:
        """Return the minimum number of units, and the step by which it grows."""

    def most(self, size: Callable[[int], int], tokenizer: TextTokens, length: int) -> int:
        """Return how many units a sample has at first; `size(units)` is its length in tokens."""
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

    def _sample(self, seed: int, index: int, tokenizer: TextTokens, length: int, stream: str) -> Sample:
        def made(units: int) -> tuple[TaskText, list[int], list[int]]:
            text = self.text_of(Random(stream), units, index, length)
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
        """Raise TaskError if options or length are invalid; no sample is generated."""
        if length <= self.generate:
            raise TaskError(
                f"{self.name}: a length of {length} has no room beside the {self.generate} generated tokens",
                code="does-not-fit",
            )


@lru_cache(1024)
def fitted(task: FittedTask, tokenizer: TextTokens, length: int) -> int:
    """Return how many units fit in a first sample; cached by task, tokenizer and length."""

    def size(units: int) -> int:
        text = task.text_of(Random(f"{task.name} fitting"), units, 0, length)
        answer = len(tokenizer.encode(text.answer))
        return len(tokenizer.encode(text.question + text.answer_prefix)) + max(task.generate, answer)

    return most_units(size, length, *task.steps(length))
