"""Self-Extend: full attention whose far keys have positions that they share in groups. Jin et al. 2024, for evaluation.

    s_ij = q_i . k_j                       where i - j < w, with the positions that both were rotated by
           q_i' . k_j'                     elsewhere: i at floor(i / G) + w - floor(w / G), j at floor(j / G)

G is the group, w the number of neighbours. Far queries and keys are the near ones, turned on from their positions to
the shared ones, so that what is carried of a row is what attention carries. Blocks of queries are scored one after
another; there is no faster form, and training has none of this.

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
    """Where the row's tokens stand in their documents, and how queries and keys were rotated by that."""

    positions_BL: Tensor
    rope: RopeOptions
    channels: int


@untraced
def self_extended(inputs: AttentionInputs, places: Places, by: SelfExtendOptions) -> Tensor:
    """Attention to near keys as they are, and to far keys by groups."""
    keys, (_, length, _, head_dim) = with_memory(inputs), inputs.q_BLHK.shape
    total, own_BL = keys.keys_BSGK.shape[1], places.positions_BL
    back_M = torch.arange(total - length, 0, -1, device=own_BL.device)
    positions_BS = torch.cat((own_BL[:, :1] - back_M, own_BL), dim=1)  # of what is remembered, as it is just before
    begin = by.neighbours - by.neighbours // by.group
    far_q = _turned(inputs.q_BLHK, own_BL // by.group + begin - own_BL, places)
    far_k = _turned(keys.keys_BSGK, positions_BS // by.group - positions_BS, places)
    values_BSGK, found = at_least_fp32(keys.values_BSGK), []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first, last = total - length + start, total - length + stop  # of the block among the keys
        near, far = slice(max(0, first - by.neighbours + 1), last), slice(0, max(0, last - by.neighbours))
        is_near, is_far = _seen(keys, first, last, by.neighbours)
        of_near = _scores(inputs.q_BLHK[:, start:stop], keys.keys_BSGK[:, near], is_near[..., near])
        of_far = _scores(far_q[:, start:stop], far_k[:, far], is_far[..., far])
        weights = (torch.cat((of_near, of_far), dim=-1) * head_dim**-0.5).softmax(-1)
        values = torch.cat((values_BSGK[:, near], values_BSGK[:, far]), dim=1)
        found.append(torch.einsum("bgaqs,bsgk->bqgak", weights, values).flatten(2, 3))
    return torch.cat(found, dim=1).to(inputs.q_BLHK.dtype)


def _seen(keys: AttentionKeys, first: int, last: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Which of the keys before `last` the queries from `first` on see as near ones and as far ones, (1 or B, Q, S)."""
    places_S = torch.arange(last, device=keys.keys_BSGK.device)
    distance_QS = places_S[first:, None] - places_S
    near, far = (distance_QS >= 0) & (distance_QS < neighbours), distance_QS >= neighbours
    if keys.documents_BS is None:
        return near[None], far[None]
    same_BQS = keys.documents_BS[:, first:last, None] == keys.documents_BS[:, None, :last]
    return near & same_BQS, far & same_BQS


def _turned(x: Tensor, by_BL: Tensor, places: Places) -> Tensor:
    """Rotated on by a number of positions; YaRN's factor is in it already."""
    return apply_rope(RopeInputs(x, *rope_table(by_BL, places.channels, replace(places.rope, attention=1.0))))


def _scores(q_BQHK: Tensor, k_BSGK: Tensor, seen: Tensor) -> Tensor:
    q_BQGAK = at_least_fp32(q_BQHK).unflatten(2, (k_BSGK.shape[2], -1))
    scores_BGAQS = torch.einsum("bqgak,bsgk->bgaqs", q_BQGAK, at_least_fp32(k_BSGK))
    return scores_BGAQS.masked_fill(~seen[:, None, None], -torch.inf)
