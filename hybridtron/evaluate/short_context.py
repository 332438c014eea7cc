"""Baseline for perplexity by position: the same tokens, with context limited to the training length.

Perplexity by position depends on the text as much as on the model, because some parts of a text are harder to predict
than others. So the same tokens are predicted once more, with limited context: the long row is divided into short rows
of the training length S, which begin every S/2 tokens. Each token's loss is taken from the short row that gives it the
most context. This context has at least S/2 tokens. Near the long row's start it has all earlier tokens. The ratio of
the two perplexities shows how much the context beyond the training length helps or harms.

Legend: B long rows, T tokens per long row, L = T - 1 predictions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.evaluate.length import Advance, position_losses, unheard
from hybridtron.inference.reader import Reader


class ShortRow(NamedTuple):
    """A short row: the tokens `start` to `end` - 1 in the long row, each with a prediction of the next token.

    Only the predictions after the tokens `before` to `end` - 1 count. All three numbers are positions in the long row.
    """

    start: int
    before: int
    end: int


def short_rows(length: int, seq_len: int) -> list[ShortRow]:
    """Divide a long row into overlapping short rows of at most `seq_len` tokens; every prediction counts once."""
    step = (seq_len + 1) // 2
    ends = [*range(min(seq_len, length), length, step), length]
    return [ShortRow(max(0, end - seq_len), before, end) for before, end in pairwise([0, *ends])]


def losses_within(model: Reader, tokens_BT: Tensor, seq_len: int, chunk: int, advance: Advance = unheard) -> Tensor:
    """Compute -log q by position, averaged over long rows, with context limited to `seq_len` tokens.

    Returns (L,) in float64 on the CPU, in nats. Entry i is the loss for the token at position i + 1.
    """
    row_losses = []
    for start, before, end in short_rows(tokens_BT.shape[1] - 1, seq_len):
        row_losses.append(position_losses(model, tokens_BT[:, start : end + 1], chunk, advance)[before - start :])
    return torch.cat(row_losses)
