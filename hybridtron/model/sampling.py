"""Which token follows: the likeliest one, or one that is drawn from what temperature, top-k and top-p leave.

    p = softmax(logits / temperature);  of p the `top_k` likeliest tokens, and of these the fewest whose mass is `top_p`

A draw is a pure function of the seed, the row's number and how many tokens the row has: the first token, in the order
of the vocabulary, at which the sum of p passes the number u in [0, 1) of these three. So a row draws the same alone, in
a batch, and on every rank. No beams, no penalties.

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
    """Temperature 0 takes the likeliest token; `top_k` 0 and `top_p` 1 leave all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


def choose(logits_BV: Tensor, sampling: Sampling, rows: Sequence[int], made: int) -> Tensor:
    """The next token of each row (B,), of rows with these numbers that have `made` tokens."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    sums_BV = kept(logits_BV.double() / sampling.temperature, sampling).softmax(-1).cumsum(-1)
    u_B1 = sums_BV.new_tensor([[uniform(sampling.seed, row, made)] for row in rows])
    return torch.searchsorted(sums_BV, u_B1 * sums_BV[:, -1:], right=True).squeeze(1)


def kept(scores_BV: Tensor, sampling: Sampling) -> Tensor:
    """The scores of the tokens that may be drawn, minus infinity elsewhere."""
    if 0 < sampling.top_k < scores_BV.shape[1]:
        least_B1 = scores_BV.topk(sampling.top_k).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        ordered_BV, places_BV = scores_BV.sort(descending=True, stable=True)
        mass_BV = ordered_BV.softmax(-1)
        beyond_BV = mass_BV.cumsum(-1) - mass_BV >= sampling.top_p  # the likelier ones have it already
        beyond_BV[:, 0] = False
        scores_BV = scores_BV.masked_fill(torch.zeros_like(beyond_BV).scatter(1, places_BV, beyond_BV), -torch.inf)
    return scores_BV


def uniform(seed: int, row: int, made: int) -> float:
    """A number in [0, 1), of 32 bits: times the sum of p it is below that sum in float64."""
    return (seed_of(seed, f"token/{row}/{made}") >> 32) / 2**32
