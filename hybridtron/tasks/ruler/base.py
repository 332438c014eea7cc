"""The base class for RULER's tasks: metric, shuffling and lists.

Templates, rules and metrics follow the public generator. `faithful=true` also reproduces its accidents: texts grow in
steps of 500 words or 25 lines, and all samples are shuffled alike, so that facts are at the same positions.
Its random stream is not reproduced: here a sample depends only on its seed and index. The answers in training data are
ours, since the public suite only evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from hybridtron.tasks.base import Sample
from hybridtron.tasks.fitted import FittedTask
from hybridtron.tasks.metrics import string_match_all

SHUFFLE_SEED = 42  # the public generator's
SHORT = 4096  # length below which the public generator takes smaller steps


class RulerTask(FittedTask):
    """A task scored by the fraction of its outputs that occur in the answer."""

    faithful: bool

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        return {"string_match_all": string_match_all(answer, sample.outputs)}

    def chance(self) -> float:
        return 0.0  # answers are among thousands of words or millions of numbers

    def shuffled(self, items: list[Any], random: Random) -> list[Any]:
        """Return the items shuffled: by the sample's `random`, or with `faithful` by the same seed for all samples."""
        items = list(items)
        (Random(SHUFFLE_SEED) if self.faithful else random).shuffle(items)
        return items


def listed(items: Sequence[str]) -> str:
    """Join items as `a, b, c, and d`."""
    if len(items) > 1:
        return ", ".join(items[:-1]) + ", and " + items[-1]
    return items[0]
