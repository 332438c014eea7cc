"""Tokens far beyond the training length, read within it: what their perplexity would be without all that is far away.

Perplexity by position says as much of the text as of the model, since text is harder in one place than in another: a
model that reads equally well everywhere seems to rise over the least of its own curve. So the same tokens are read
once more, in rows of the training length T that begin every T/2 tokens, and each token counts in the row that shows
most before it: T/2 tokens at least, or all that there are. What is far away helps or harms by the ratio of the two.

Letters: as in `length.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.evaluate.length import Advance, position_losses, unheard
from hybridtron.model.generate import Reader


class ShortRow(NamedTuple):
    """Tokens `start` to `end` and the one after; what is predicted after more than `before` tokens counts."""

    start: int
    before: int
    end: int


def short_rows(length: int, seq_len: int) -> list[ShortRow]:
    """Rows of at most the training length, in which every prediction counts once."""
    step = (seq_len + 1) // 2
    ends = [*range(min(seq_len, length), length, step), length]
    return [ShortRow(max(0, end - seq_len), before, end) for before, end in pairwise([0, *ends])]


def losses_within(model: Reader, tokens_BT: Tensor, seq_len: int, chunk: int, advance: Advance = unheard) -> Tensor:
    """Mean over rows of -log q by position, as `position_losses`, with each token read within the training length."""
    found = []
    for start, before, end in short_rows(tokens_BT.shape[1] - 1, seq_len):
        found.append(position_losses(model, tokens_BT[:, start : end + 1], chunk, advance)[before - start :])
    return torch.cat(found)
