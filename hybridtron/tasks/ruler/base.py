"""What RULER's tasks share: metric, shuffles, lists.

Template, rules and metric are those of the public generator. `faithful=true` also has what is its accident rather than
its design: steps of 500 words or 25 lines, and shuffles that are the same for every sample, so that facts stand at the
same place in all of them. Its random stream is not reproduced: a sample here depends on its seed and index alone.
The answer that follows a prompt in training is ours, as the suite only evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from hybridtron.tasks.base import Sample
from hybridtron.tasks.fitted import FittedTask
from hybridtron.tasks.metrics import string_match_all

SHUFFLE_SEED = 42  # of the public generator
SHORT = 4096  # below this it takes smaller steps


class RulerTask(FittedTask):
    """A task that is scored by the share of its outputs in the answer."""

    faithful: bool

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        return {"string_match_all": string_match_all(answer, sample.outputs)}

    def chance(self) -> float:
        return 0.0  # of thousands of words or millions of numbers

    def shuffled(self, items: list[Any], random: Random) -> list[Any]:
        """Each sample in an order of its own, or all in the same."""
        items = list(items)
        (Random(SHUFFLE_SEED) if self.faithful else random).shuffle(items)
        return items


def listed(items: Sequence[str]) -> str:
    """`a, b, c, and d`."""
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]
