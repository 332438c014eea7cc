"""Sample the next token: the likeliest one, or a draw by temperature, top-k and top-p.

    p = softmax(logits / temperature), over the `top_k` likeliest tokens, and of these over the fewest with mass `top_p`

A draw is a pure function of the seed, the row's number and its number of tokens. They give a number u in [0, 1), and
the draw is the first token, in the vocabulary's order, at which the cumulative sum of p exceeds u. So a row draws the
same tokens alone, in a batch, and on every rank. There are no beams and no penalties.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.data.batch import seed_of


@dataclass(frozen=True)
class Sampling:
    """Sampling options. Temperature 0 takes the likeliest token; `top_k` 0 and `top_p` 1 allow all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


def choose(logits_BV: Tensor, sampling: Sampling, rows: Sequence[int], made: int) -> Tensor:
    """Return the next token of each row (B,); `rows` are the rows' numbers, `made` the tokens they have."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    sums_BV = kept(logits_BV.double() / sampling.temperature, sampling).softmax(-1).cumsum(-1)
    u_B1 = sums_BV.new_tensor([[uniform(sampling.seed, row, made)] for row in rows])
    return torch.searchsorted(sums_BV, u_B1 * sums_BV[:, -1:], right=True).squeeze(1)


def kept(scores_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the scores of the tokens that may be drawn, minus infinity elsewhere."""
    if 0 < sampling.top_k < scores_BV.shape[1]:
        least_B1 = scores_BV.topk(sampling.top_k).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        ordered_BV, places_BV = scores_BV.sort(descending=True, stable=True)
        mass_BV = ordered_BV.softmax(-1)
        beyond_BV = mass_BV.cumsum(-1) - mass_BV >= sampling.top_p  # likelier tokens already have this mass
        beyond_BV[:, 0] = False
        scores_BV = scores_BV.masked_fill(torch.zeros_like(beyond_BV).scatter(1, places_BV, beyond_BV), -torch.inf)
    return scores_BV


def uniform(seed: int, row: int, made: int) -> float:
    """Return a number in [0, 1) with 32 bits: its product with the sum of p stays below that sum in float64."""
    return (seed_of(seed, f"token/{row}/{made}") >> 32) / 2**32
