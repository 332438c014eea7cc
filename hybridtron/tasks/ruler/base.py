"""What RULER's tasks share: a text with a number of units that is fitted to a length, its template and its answer.

Length = tokens of the prompt + tokens to generate, without special tokens. Template, rules and metric are those of the
public generator. `faithful=true` also has what is its accident rather than its design: steps of 500 words or 25 lines,
and shuffles that are the same for every sample, so that facts stand at the same place in all of them. Its own random
stream is not reproduced: a sample here depends on nothing but its seed and index.
The answer that follows a prompt in training is ours, as the suite only evaluates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from hybridtron.tasks.base import Sample, Task, TaskError, TextTokens
from hybridtron.tasks.fitting import most_units, shrink
from hybridtron.tasks.metrics import string_match_all

SHUFFLE_SEED = 42  # of the public generator
SHORT = 4096  # below this it takes smaller steps


@dataclass(frozen=True)
class RulerText:
    """A sample before it is tokens."""

    question: str
    answer_prefix: str
    answer: str
    outputs: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class RulerTask(Task):
    """A task whose text grows by units."""

    generate: ClassVar[int]
    faithful: bool

    @abstractmethod
    def text_of(self, random: Random, units: int, index: int, length: int) -> RulerText:
        """The text of sample `index` with this number of units, for a length of which they are a part."""

    @abstractmethod
    def steps(self, length: int) -> tuple[int, int]:
        """The fewest units, and how many more at a time."""

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self.check(length)

        def made(units: int) -> tuple[RulerText, list[int], list[int]]:
            text = self.text_of(self.random(seed, index), units, index, length)
            return text, tokenizer.encode(text.question + text.answer_prefix), tokenizer.encode(text.answer)

        def size(units: int) -> int:
            _, prompt, answer = made(units)
            return len(prompt) + max(self.generate, len(answer))

        fewest, step = self.steps(length)
        most = fitted(self, tokenizer, length)
        units = shrink(size, length, most, fewest, step, self.name)
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
            meta={"answer_prefix": text.answer_prefix, "units": units, "faithful": self.faithful, **text.meta},
        )

    def check(self, length: int) -> None:
        """TaskError where options or length can't work; without making a sample."""
        if length <= self.generate:
            raise TaskError(
                f"{self.name}: a length of {length} has no room beside the {self.generate} generated tokens"
            )

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        return {"string_match_all": string_match_all(answer, sample.outputs)}

    def chance(self) -> float:
        return 0.0  # of thousands of words or millions of numbers

    def shuffled(self, items: list[Any], random: Random) -> list[Any]:
        """Each sample in an order of its own, or all in the same."""
        items = list(items)
        (Random(SHUFFLE_SEED) if self.faithful else random).shuffle(items)
        return items


@lru_cache(1024)
def fitted(task: RulerTask, tokenizer: TextTokens, length: int) -> int:
    """The units that fit in a first sample; all others start from there."""

    def size(units: int) -> int:
        text = task.text_of(Random(f"{task.name} fitting"), units, 0, length)
        answer = len(tokenizer.encode(text.answer))
        return len(tokenizer.encode(text.question + text.answer_prefix)) + max(task.generate, answer)

    return most_units(size, length, *task.steps(length))


def listed(items: Sequence[str]) -> str:
    """`a, b, c, and d`."""
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]
