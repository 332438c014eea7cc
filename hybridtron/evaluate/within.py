"""Baseline for perplexity by position: the same tokens, with the context limited to the training length.

Perplexity by position depends on the text as much as on the model, because text is harder in some places than in
others. A model that reads equally well everywhere would seem to get worse after the easiest part. So the same tokens
are read once more, in rows with the training length T that begin every T/2 tokens. Each token counts in the row that
shows the most tokens before it: at least T/2, or all that there are. The ratio between both perplexities shows how much
the more distant context helps or harms.

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
    """A row that reads tokens `start` to `end` and predicts up to the one after.

    Only predictions after more than `before` tokens count, in the long row's positions.
    """

    start: int
    before: int
    end: int


def short_rows(length: int, seq_len: int) -> list[ShortRow]:
    """Divide a long row into rows up to the training length, such that every prediction counts once."""
    step = (seq_len + 1) // 2
    ends = [*range(min(seq_len, length), length, step), length]
    return [ShortRow(max(0, end - seq_len), before, end) for before, end in pairwise([0, *ends])]


def losses_within(model: Reader, tokens_BT: Tensor, seq_len: int, chunk: int, advance: Advance = unheard) -> Tensor:
    """Compute the mean over rows of -log q by position, with each token read within the training length.

    Returns (L,), like `position_losses`.
    """
    row_losses = []
    for start, before, end in short_rows(tokens_BT.shape[1] - 1, seq_len):
        row_losses.append(position_losses(model, tokens_BT[:, start : end + 1], chunk, advance)[before - start :])
    return torch.cat(row_losses)
