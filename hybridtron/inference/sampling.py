"""Sample the next token: the likeliest token, or a draw by temperature, top-k and top-p.

    p = softmax(logits / temperature), over the allowed tokens

Top-k allows the `top_k` likeliest tokens. Among these, top-p allows the smallest number of likeliest tokens whose
probabilities sum to at least `top_p`.

A draw is a pure function with three arguments: the seed, an integer that identifies the row (sequence), and how many
tokens the row has generated. A hash of these three is mapped to a number u in [0, 1). The drawn token is the first
token, in the vocabulary's order, at which the cumulative sum of p exceeds u. A row therefore draws the same tokens
alone, in a batch, and on every rank. Beam search and repetition penalties are not implemented.

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


def choose(logits_BV: Tensor, sampling: Sampling, rows: Sequence[int], generated: int) -> Tensor:
    """Return each row's next token (B,).

    `rows` has the integer that identifies each row. `generated` says how many tokens each row has so far.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    sums_BV = allowed_scores(logits_BV.double() / sampling.temperature, sampling).softmax(-1).cumsum(-1)
    u_B1 = sums_BV.new_tensor([[uniform(sampling.seed, row, generated)] for row in rows])
    return torch.searchsorted(sums_BV, u_B1 * sums_BV[:, -1:], right=True).squeeze(1)


def allowed_scores(scores_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the scores, with minus infinity for the tokens that top-k or top-p excludes."""
    if 0 < sampling.top_k < scores_BV.shape[1]:
        least_B1 = scores_BV.topk(sampling.top_k).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        ordered_BV, places_BV = scores_BV.sort(descending=True, stable=True)
        mass_BV = ordered_BV.softmax(-1)
        beyond_BV = mass_BV.cumsum(-1) - mass_BV >= sampling.top_p  # likelier tokens already sum to top_p
        beyond_BV[:, 0] = False
        scores_BV = scores_BV.masked_fill(torch.zeros_like(beyond_BV).scatter(1, places_BV, beyond_BV), -torch.inf)
    return scores_BV


def uniform(seed: int, row: int, generated: int) -> float:
    """Return a number u in [0, 1) with 32 bits.

    With 32 bits u is at most 1 - 2^-32. In float64, u times the sum of p is then below the sum of p, so a token is
    always drawn.
    """
    return (seed_of(seed, f"token/{row}/{generated}") >> 32) / 2**32
