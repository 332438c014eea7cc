"""Sparse attention: a query sees few keys, by where they stand, by the bins of a hash, or by their scores.

    y_i = sum_j a_ij v_j,   a_i = softmax over the keys j that i sees of  q_i . k_j;   0 where it sees none

The keys carry the scale. Token i sees only tokens j <= i of its document, and of those, together, what a budget gives:

    recent   the last ones
    first    the first ones of the document
    strided  the last ones at every `stride`th place of the document, the stride's own multiples counted from 1
    bin      the last ones whose keys are in the bin of the query
    best     those of largest score among all up to the query, of equals the earlier ones

The keys of a row stand behind those that were remembered of its first document (`memory`), in the order of the text.

Legend: R rows, each one group of heads of a row of the batch; L queries, S keys in all, of which the row's own are the
last L; N size of a key, P of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class Budget(NamedTuple):
    """How many keys each rule gives a query; a key that several give counts once."""

    recent: int = 0
    first: int = 0
    strided: int = 0
    bin: int = 0
    best: int = 0
    stride: int = 1


class Seen(NamedTuple):
    """What decides which keys a query sees; no gradient flows through any of it.

    documents_RS: the number of each token's document in its row, rising; -1 where a key stands for no token.
    places_RS: the place of each token in its document. The bins of queries and keys, and the scores of keys, are there
    where the budget asks for them.
    """

    budget: Budget
    documents_RS: Tensor
    places_RS: Tensor
    query_bins_RL: Tensor | None = None
    key_bins_RS: Tensor | None = None
    scores_RS: Tensor | None = None


class SparseInputs(NamedTuple):
    """Queries, keys and values, and what decides who sees whom."""

    q_RLN: Tensor
    k_RSN: Tensor
    v_RSP: Tensor
    seen: Seen


def visible_keys(seen: Seen, length: int) -> Tensor:
    """The rules: which keys each of the last `length` tokens sees, (R, L, S)."""
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
    """Of what is true along the last axis, the last `most`."""
    return true & (true.flip(-1).cumsum(-1).flip(-1) <= most)


def sparse_attention(inputs: SparseInputs) -> Tensor:
    """Attention by the rules, with a dense mask and an fp32 softmax; (R, L, P)."""
    q_RLN, k_RSN, v_RSP = (at_least_fp32(x) for x in inputs[:3])
    visible_RLS = visible_keys(inputs.seen, q_RLN.shape[1])
    empty_RL = ~visible_RLS.any(-1, keepdim=True)
    scores_RLS = (q_RLN @ k_RSN.mT).masked_fill(~visible_RLS & ~empty_RL, -torch.inf)
    weights_RLS = scores_RLS.softmax(-1).masked_fill(empty_RL, 0.0)
    return (weights_RLS @ v_RSP).to(inputs.v_RSP.dtype)
