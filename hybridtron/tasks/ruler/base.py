"""The base class for RULER's tasks, with their metric and their shuffling, and a function that joins words.

Prompts, rules and metrics follow RULER's public generator. With `faithful=true` two unintended properties of the
generator are reproduced too. First, a text is lengthened in coarse steps, such as 500 words or 25 lines, so it may be
much shorter than the context. Second, all samples are shuffled by the same permutation, so facts are at the same
positions in every sample. The generator's random numbers are not reproduced: here a sample depends only on its seed and
index. RULER has no training data, so the wording of training answers is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from hybridtron.tasks.base import Sample
from hybridtron.tasks.fitted import FittedTask
from hybridtron.tasks.metrics import string_match_all

SHUFFLE_SEED = 42  # the public generator's seed for shuffling
SHORT = 4096  # context length in tokens; for shorter contexts the public generator has finer steps or easier variants


class RulerTask(FittedTask):
    """A task scored by the fraction of the expected strings (RULER's `outputs`) that occur in the model's answer."""

    faithful: bool

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        return {"string_match_all": string_match_all(answer, sample.outputs)}

    def chance(self) -> float:
        return 0.0  # nearly 0: the possible answers are thousands of words or millions of numbers

    def shuffled(self, items: list[Any], random: Random) -> list[Any]:
        """Return the items in an order drawn by `random`, or with `faithful` by the same seed for all samples."""
        items = list(items)
        (Random(SHUFFLE_SEED) if self.faithful else random).shuffle(items)
        return items


def listed(items: Sequence[str]) -> str:
    """Join items as `a, b, c, and d`; two items as `a, and b`."""
    if len(items) > 1:
        return ", ".join(items[:-1]) + ", and " + items[-1]
    return items[0]
