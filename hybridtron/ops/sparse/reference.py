"""Sparse attention: a query sees few keys, selected by their position, by the bins of a hash, or by their scores.

    y_i = sum_j a_ij v_j,   a_i = softmax over the keys j that i sees of  q_i . k_j;   0 where it sees none

The keys are already scaled. Token i sees only tokens j <= i of its document. Among these the rules of a budget select
keys, and the query sees all that some rule selects:

    recent   the last ones
    first    the first ones of the document
    strided  the last ones at places of the document that are multiples of `stride`, counted from 1
    bin      the last ones whose keys are in the query's bin
    best     those with the largest scores among all up to the query; ties go to the earlier key

In the order of the text, the row's own keys follow those remembered from its first document (`memory`).

Legend: R rows, one for each group of heads in each row of the batch; L queries, S keys in all, the last L of which are
the row's own; N size of a key, P of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class Budget(NamedTuple):
    """The maximum number of keys that each rule selects for a query; rules may select the same key."""

    recent: int = 0
    first: int = 0
    strided: int = 0
    bin: int = 0
    best: int = 0
    stride: int = 1


class Seen(NamedTuple):
    """The inputs of the rules that select a query's keys; no gradient flows through them.

    documents_RS: the number of each token's document in its row, rising; -1 for a key without a token.
    places_RS: each token's position in its document. Bins and scores are given if the budget has a rule for them.
    """

    budget: Budget
    documents_RS: Tensor
    places_RS: Tensor
    query_bins_RL: Tensor | None = None
    key_bins_RS: Tensor | None = None
    scores_RS: Tensor | None = None


class SparseInputs(NamedTuple):
    """Queries, keys and values, and the inputs of the rules that select keys."""

    q_RLN: Tensor
    k_RSN: Tensor
    v_RSP: Tensor
    seen: Seen


def visible_keys(seen: Seen, length: int) -> Tensor:
    """Apply the rules: return a mask for the last `length` tokens, True where one sees a key, (R, L, S)."""
    budget, documents_RS, places_RS, query_bins_RL, key_bins_RS, scores_RS = seen
    total = documents_RS.shape[1]
    index_S = torch.arange(total, device=documents_RS.device)
    allowed_RLS = documents_RS[:, -length:, None] == documents_RS[:, None]
    allowed_RLS &= (index_S <= index_S[-length:, None]) & (documents_RS >= 0)[:, None]
    ago_RLS = places_RS[:, -length:, None] - places_RS[:, None]
    visible_RLS = allowed_RLS & ((ago_RLS < budget.recent) | (places_RS < budget.first)[:, None])
    if budget.strided:
        visible_RLS |= last_ones(allowed_RLS & ((places_RS + 1) % budget.stride == 0)[:, None], budget.strided)
    if query_bins_RL is not None and key_bins_RS is not None:
        visible_RLS |= last_ones(allowed_RLS & (query_bins_RL[..., None] == key_bins_RS[:, None]), budget.bin)
    if scores_RS is not None:
        scores_RLS = scores_RS[:, None].expand_as(allowed_RLS).masked_fill(~allowed_RLS, -torch.inf)
        best_RLK = scores_RLS.sort(dim=-1, descending=True, stable=True).indices[..., : budget.best]
        visible_RLS |= torch.zeros_like(allowed_RLS).scatter_(-1, best_RLK, True) & allowed_RLS
    return visible_RLS


def last_ones(true: Tensor, most: int) -> Tensor:
    """Keep only the last `most` true entries along the last axis."""
    return true & (true.flip(-1).cumsum(-1).flip(-1) <= most)


def sparse_attention(inputs: SparseInputs) -> Tensor:
    """Compute attention by the rules, with a dense mask and an fp32 softmax; (R, L, P)."""
    q_RLN, k_RSN, v_RSP = (at_least_fp32(x) for x in inputs[:3])
    visible_RLS = visible_keys(inputs.seen, q_RLN.shape[1])
    empty_RL = ~visible_RLS.any(-1, keepdim=True)
    scores_RLS = (q_RLN @ k_RSN.mT).masked_fill(~visible_RLS & ~empty_RL, -torch.inf)
    weights_RLS = scores_RLS.softmax(-1).masked_fill(empty_RL, 0.0)
    return (weights_RLS @ v_RSP).to(inputs.v_RSP.dtype)
