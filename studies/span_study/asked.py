"""A model's recall in rows of every length, by distance of the needles.

Each model is read with full attention, and with the attention of its training. Values are counted in bins by the
distance to their pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.architecture.attention import ReadingAttention

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.evaluate.loaded_model import LoadedModel
    from hybridtron.model.lm import LanguageModel
    from hybridtron.tasks.mqar import MultiQueryRecall

VOCABULARY = 128
NOISE = 64
PAIRS = 16
LENGTHS = (128, 256, 512, 1024, 2048)
DISTANCES = (128, 256, 512, 1024, 2048)  # upper ends of the bins of distance, in tokens back to the pair
WINDOW = 256
SEED_OF_SAMPLES = 7
BATCH = 16


@dataclass(frozen=True)
class Asked:
    """Answers in rows of one length, by bins of distance: the asked values, the right answers, and the summed loss in
    nats.
    """

    asked: Sequence[int]
    right: Sequence[int]
    nats: Sequence[float]

    @property
    def recall(self) -> float:
        return sum(self.right) / sum(self.asked)

    @property
    def perplexity(self) -> float:
        """Perplexity of the asked values, the only predictable tokens of a row."""
        return math.exp(sum(self.nats) / sum(self.asked))

    def within(self, inside: bool) -> float | None:
        """Return the recall of needles inside the window, or beyond it; None if there are none."""
        bins = [index for index, last in enumerate(DISTANCES) if (last <= WINDOW) == inside]
        asked = sum(self.asked[index] for index in bins)
        if not asked:
            return None
        return sum(self.right[index] for index in bins) / asked


Readings = dict[ReadingAttention, dict[int, Asked]]
"""Answers by attention and length."""


def task(pairs: int = PAIRS) -> MultiQueryRecall:
    """Return the MQAR task: pairs at the beginning of a row, then noise, in which each key appears once more.

    The keys' places are drawn uniformly (`power=1.0`).
    """
    from hybridtron.tasks.mqar import MultiQueryRecall

    return MultiQueryRecall(pairs=pairs, vocabulary=VOCABULARY, noise=NOISE, power=1.0, follows=True)


def readings_of(record: Mapping[str, Any]) -> Readings:
    """Parse a stored result.

    A model trained with full attention has one reading, which stands for both.
    """
    readings = {
        ReadingAttention(how): {int(length): Asked(**fields) for length, fields in by_length.items()}
        for how, by_length in record.items()
    }
    return {how: readings.get(how, readings[ReadingAttention.full]) for how in ReadingAttention}


def recalled(run: Path, lengths: Sequence[int], rows: int) -> dict[str, Any]:
    """Measure a run at all lengths with each attention; `readings_of` parses the result.

    An attention that gives the same model as one before is not measured twice.
    """
    from hybridtron.cli.arguments import newest_checkpoint
    from hybridtron.evaluate.length import attention_at_eval
    from hybridtron.evaluate.loaded_model import load_model

    answers_by_attention: dict[str, Any] = {}
    seen = list[dict[str, str]]()
    for how in ReadingAttention:
        with load_model(newest_checkpoint(run), attention=how) as model:
            attention = attention_at_eval(model.arch)
            if attention not in seen:
                answers_by_attention[how.value] = {str(length): at_length(model, length, rows) for length in lengths}
            seen.append(attention)
    return answers_by_attention


def at_length(model: LoadedModel, length: int, rows: int) -> dict[str, Sequence[float]]:
    """Measure answers in rows of one length; returns the fields of `Asked`."""
    asked, right, nats = ([0.0] * len(DISTANCES) for _ in range(3))
    for distance, loss, is_right in answers(model, length, rows):
        number = next(index for index, last in enumerate(DISTANCES) if distance <= last)
        asked[number] += 1
        right[number] += is_right
        nats[number] += loss
    counts = {"asked": list(map(int, asked)), "right": list(map(int, right))}
    return {**counts, "nats": [round(total, 3) for total in nats]}


def answers(model: LoadedModel, length: int, rows: int) -> Iterator[tuple[int, float, bool]]:
    """Yield distance, loss and correctness of each asked value.

    The distance is the number of tokens back to its pair; an answer is correct if it is the likeliest token.
    """
    import torch

    from hybridtron.evaluate.length import fitting_chunk, of_labels
    from hybridtron.tasks.tokens import ByteTokens

    every = [task().sample(SEED_OF_SAMPLES, index, ByteTokens(), length) for index in range(rows)]
    chunk = fitting_chunk(model.arch, BATCH)
    for first in range(0, rows, BATCH):
        samples = every[first : first + BATCH]
        tokens_BT = torch.tensor([sample.tokens for sample in samples])
        losses_LBX = of_labels(model.read, tokens_BT, chunk, judged, (2,))
        for row, sample in enumerate(samples):
            for number, place in enumerate(sample.meta["places"]):
                loss, is_right = losses_LBX[place, row].tolist()
                yield place - 2 * number, loss, bool(is_right)


def judged(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    """Return for each label its loss, and whether it is the likeliest token, in a last axis of size 2."""
    import torch

    from hybridtron.evaluate.length import label_losses
    from hybridtron.parallel.vocabulary import likeliest

    right_CB = likeliest(x_CBD, stage.output_weight(), stage.slice.tensor) == labels_CB
    return torch.stack((label_losses(labels_CB, stage, x_CBD), right_CB), dim=-1)
