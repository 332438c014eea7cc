"""Sparse attention: a query sees few keys, selected by their position, their hash value, or their score.

    y_i = sum_j a_ij v_j,   a_i = softmax_j(q_i . k_j) over the keys j that query i sees
    y_i = 0 if query i sees no key

The caller has already divided the keys by the square root of their size N. Query i can see only tokens j <= i in its
document. Five rules select keys among these tokens. For each rule, the budget has the maximum number of keys that the
rule selects for a query. A query sees every key that at least one rule selects:

    recent   the last keys, the query's own token included
    first    the first keys in the document
    strided  the last keys whose position in the document, counted from 1, is a multiple of `stride`
    bin      the last keys in the query's bin; the bin of a query or key is its hash value (`hashing.py`)
    best     the keys with the largest scores; if two keys have equal scores, the earlier key is preferred

In the rule `best`, a key has one score, which is the same for every query. The caller passes these scores
(`scores_RS`); they are not the products q . k.

A sequence may continue a document from the previous sequence. Then the keys that are remembered from this document
(`memory.py`) precede the sequence's own keys.

Legend: R rows (a row for each sequence in the batch and each head group), L queries, S keys (first the remembered keys,
then the sequence's L keys), N key size, P value size, K best keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class Budget(NamedTuple):
    """The maximum number of keys that each rule selects for a query (0: the rule is off), and the stride.

    Two rules may select the same key.
    """

    recent: int = 0
    first: int = 0
    strided: int = 0
    bin: int = 0
    best: int = 0
    stride: int = 1


class Seen(NamedTuple):
    """The inputs to the rules that select a query's keys. They get no gradient.

    budget: maximum number of keys per rule
    documents_RS: each key's document index; -1 for an empty slot in the memory; indices never decrease along a row
    places_RS: each key's position in its document, counted from 0
    query_bins_RL, key_bins_RS: hash values; None if the rule `bin` is off
    scores_RS: one score per key; None if the rule `best` is off
    """

    budget: Budget
    documents_RS: Tensor
    places_RS: Tensor
    query_bins_RL: Tensor | None = None
    key_bins_RS: Tensor | None = None
    scores_RS: Tensor | None = None


class SparseInputs(NamedTuple):
    """Queries, keys and values, and the inputs to the rules that select keys."""

    q_RLN: Tensor
    k_RSN: Tensor
    v_RSP: Tensor
    seen: Seen


def visible_keys(seen: Seen, length: int) -> Tensor:
    """Return the mask (R, L, S), True where a query sees a key; the L = `length` queries belong to the last L keys."""
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
    """Return the mask `true` with only its last `most` True entries along the last axis."""
    return true & (true.flip(-1).cumsum(-1).flip(-1) <= most)


def sparse_attention(inputs: SparseInputs) -> Tensor:
    """Return the output (R, L, P), computed with a dense mask and a softmax in at least fp32."""
    q_RLN, k_RSN, v_RSP = (at_least_fp32(x) for x in inputs[:3])
    visible_RLS = visible_keys(inputs.seen, q_RLN.shape[1])
    empty_RL = ~visible_RLS.any(-1, keepdim=True)
    scores_RLS = (q_RLN @ k_RSN.mT).masked_fill(~visible_RLS & ~empty_RL, -torch.inf)
    weights_RLS = scores_RLS.softmax(-1).masked_fill(empty_RL, 0.0)
    return (weights_RLS @ v_RSP).to(inputs.v_RSP.dtype)
