"""A task whose text grows by units, such as lines of noise or words of an essay, and is fitted to a length.

Length = tokens of the prompt + tokens to generate, without special tokens.
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
    """A sample before it is tokens. `answer` follows the prompt in training."""

    question: str
    answer_prefix: str
    answer: str
    outputs: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class FittedTask(Task):
    """What fits is found with a first sample, from which all others start and shrink as they must."""

    generate: ClassVar[int]
    tries: ClassVar[int] = 1  # draws of a sample, where one that is too long is drawn again

    @abstractmethod
    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        """The text of sample `index` with this number of units, for a length of which they are a part."""

    @abstractmethod
    def steps(self, length: int) -> tuple[int, int]:
        """The fewest units, and how many more at a time."""

    def most(self, size: Callable[[int], int], tokenizer: TextTokens, length: int) -> int:
        """The units to start from; `size` is that of the sample."""
        return fitted(self, tokenizer, length)

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self.check(length)
        self.random(seed, index)  # refuses seeds below 0
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
        """TaskError where options or length can't work; without making a sample."""
        if length <= self.generate:
            raise TaskError(
                f"{self.name}: a length of {length} has no room beside the {self.generate} generated tokens"
            )


@lru_cache(1024)
def fitted(task: FittedTask, tokenizer: TextTokens, length: int) -> int:
    """The units that fit in a first sample."""

    def size(units: int) -> int:
        text = task.text_of(Random(f"{task.name} fitting"), units, 0, length)
        answer = len(tokenizer.encode(text.answer))
        return len(tokenizer.encode(text.question + text.answer_prefix)) + max(task.generate, answer)

    return most_units(size, length, *task.steps(length))
