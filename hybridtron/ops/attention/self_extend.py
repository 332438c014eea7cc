"""Self-Extend (Jin et al. 2024): full attention in which groups of far keys share a position. For evaluation only.

    s_ij = q_i . k_j                       where i - j < w, with the positions by which both were rotated
           q_i' . k_j'                     elsewhere: i at floor(i / G) + w - floor(w / G), j at floor(j / G)

G is the group, w the number of neighbours. Far queries and keys are the near ones, rotated further from their own
positions to the shared ones. So rows carry the same memory as in plain attention. Blocks of queries are scored one
after another. There is no faster implementation, and training does not use this.

Legend as in `reference`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.architecture.rope import RopeOptions, SelfExtendOptions
from hybridtron.ops.attention.reference import AttentionInputs, AttentionKeys, with_memory
from hybridtron.ops.dispatch import untraced
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.rope import RopeInputs, apply_rope, rope_table

BLOCK = 128  # queries that are scored at a time


class Places(NamedTuple):
    """Positions of the row's tokens in their documents, and the rotation that queries and keys were given."""

    positions_BL: Tensor
    rope: RopeOptions
    channels: int


@untraced
def self_extended(inputs: AttentionInputs, places: Places, by: SelfExtendOptions) -> Tensor:
    """Attend to near keys at their own positions, and to far keys at positions shared by groups."""
    keys = with_memory(inputs)
    (_, length, _, head_dim) = inputs.q_BLHK.shape
    total = keys.keys_BSGK.shape[1]
    query_positions_BL = places.positions_BL
    back_M = torch.arange(total - length, 0, -1, device=query_positions_BL.device)
    # remembered tokens come just before the row
    positions_BS = torch.cat((query_positions_BL[:, :1] - back_M, query_positions_BL), dim=1)
    begin = by.neighbours - by.neighbours // by.group
    far_q = _turned(inputs.q_BLHK, query_positions_BL // by.group + begin - query_positions_BL, places)
    far_k = _turned(keys.keys_BSGK, positions_BS // by.group - positions_BS, places)
    values_BSGK = at_least_fp32(keys.values_BSGK)
    outputs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        # the block among the keys
        first = total - length + start
        last = total - length + stop
        near = slice(max(0, first - by.neighbours + 1), last)
        far = slice(0, max(0, last - by.neighbours))
        is_near, is_far = _seen(keys, first, last, by.neighbours)
        of_near = _scores(inputs.q_BLHK[:, start:stop], keys.keys_BSGK[:, near], is_near[..., near])
        of_far = _scores(far_q[:, start:stop], far_k[:, far], is_far[..., far])
        weights = (torch.cat((of_near, of_far), dim=-1) * head_dim**-0.5).softmax(-1)
        values = torch.cat((values_BSGK[:, near], values_BSGK[:, far]), dim=1)
        outputs.append(torch.einsum("bgaqs,bsgk->bqgak", weights, values).flatten(2, 3))
    return torch.cat(outputs, dim=1).to(inputs.q_BLHK.dtype)


def _seen(keys: AttentionKeys, first: int, last: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return two masks (1 or B, Q, S): near and far keys before `last` that each query from `first` on sees."""
    places_S = torch.arange(last, device=keys.keys_BSGK.device)
    distance_QS = places_S[first:, None] - places_S
    near = (distance_QS >= 0) & (distance_QS < neighbours)
    far = distance_QS >= neighbours
    if keys.documents_BS is None:
        return near[None], far[None]
    same_BQS = keys.documents_BS[:, first:last, None] == keys.documents_BS[:, None, :last]
    return near & same_BQS, far & same_BQS


def _turned(x: Tensor, by_BL: Tensor, places: Places) -> Tensor:
    """Rotate x by `by_BL` further positions, without YaRN's attention factor, which x has already."""
    return apply_rope(RopeInputs(x, *rope_table(by_BL, places.channels, replace(places.rope, attention=1.0))))


def _scores(q_BQHK: Tensor, k_BSGK: Tensor, seen: Tensor) -> Tensor:
    q_BQGAK = at_least_fp32(q_BQHK).unflatten(2, (k_BSGK.shape[2], -1))
    scores_BGAQS = torch.einsum("bqgak,bsgk->bgaqs", q_BQGAK, at_least_fp32(k_BSGK))
    return scores_BGAQS.masked_fill(~seen[:, None, None], -torch.inf)
