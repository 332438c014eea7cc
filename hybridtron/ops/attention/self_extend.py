"""Self-Extend (Jin et al. 2024): full attention in which groups of far keys share a position. For evaluation only.

    s_ij = q_i . k_j      if i - j < w ("near"): rotated by their own positions i and j
           q_i' . k_j'    otherwise ("far"): q' rotated by floor(i / c) + w - floor(w / c), k' by floor(j / c)

i and j are token positions. A group has c positions (`SelfExtendOptions.group`), and w is the number of near keys
(`neighbours`). s_ij is the score for query i and key j, before it is divided by sqrt(K).

Queries and keys arrive rotated by their own positions. A second rotation, by the difference between the shared and the
own position, turns them into q' and k'. Keys are remembered for later rows without the second rotation. Query blocks
are computed one after another. There is no faster implementation, since training does not use Self-Extend.

Legend: B rows (sequences in the batch), L tokens per row, S keys per row (remembered tokens before the row, then its L
tokens), H query heads, G key/value heads, A = H / G query heads per key/value head, K channels per head, M remembered
tokens, Q queries per block.
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

BLOCK = 128  # queries whose scores are computed at a time


class Places(NamedTuple):
    """Each token's position in its document, with the rotation's options and the number of rotated channels."""

    positions_BL: Tensor
    rope: RopeOptions
    channels: int


@untraced
def self_extended(inputs: AttentionInputs, places: Places, options: SelfExtendOptions) -> Tensor:
    """Return the attention output: near keys have their own positions, far keys have their groups' positions."""
    keys = with_memory(inputs)
    (_, length, _, head_dim) = inputs.q_BLHK.shape
    total = keys.keys_BSGK.shape[1]
    query_positions_BL = places.positions_BL
    back_M = torch.arange(total - length, 0, -1, device=query_positions_BL.device)
    # remembered tokens have the positions just before the row's first token
    positions_BS = torch.cat((query_positions_BL[:, :1] - back_M, query_positions_BL), dim=1)
    begin = options.neighbours - options.neighbours // options.group
    far_q = _turned(inputs.q_BLHK, query_positions_BL // options.group + begin - query_positions_BL, places)
    far_k = _turned(keys.keys_BSGK, positions_BS // options.group - positions_BS, places)
    values_BSGK = at_least_fp32(keys.values_BSGK)
    outputs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        # first to last - 1: indices of the block's own tokens among all S keys
        first = total - length + start
        last = total - length + stop
        near = slice(max(0, first - options.neighbours + 1), last)
        far = slice(0, max(0, last - options.neighbours))
        is_near, is_far = _seen(keys, first, last, options.neighbours)
        of_near = _scores(inputs.q_BLHK[:, start:stop], keys.keys_BSGK[:, near], is_near[..., near])
        of_far = _scores(far_q[:, start:stop], far_k[:, far], is_far[..., far])
        weights = (torch.cat((of_near, of_far), dim=-1) * head_dim**-0.5).softmax(-1)
        values = torch.cat((values_BSGK[:, near], values_BSGK[:, far]), dim=1)
        outputs.append(torch.einsum("bgaqs,bsgk->bqgak", weights, values).flatten(2, 3))
    return torch.cat(outputs, dim=1).to(inputs.q_BLHK.dtype)


def _seen(keys: AttentionKeys, first: int, last: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return two masks (1 or B, Q, last) for the queries `first` to `last` - 1: their near and their far keys."""
    places_S = torch.arange(last, device=keys.keys_BSGK.device)
    distance_QS = places_S[first:, None] - places_S
    near = (distance_QS >= 0) & (distance_QS < neighbours)
    far = distance_QS >= neighbours
    if keys.documents_BS is None:
        return near[None], far[None]
    same_BQS = keys.documents_BS[:, first:last, None] == keys.documents_BS[:, None, :last]
    return near & same_BQS, far & same_BQS


def _turned(x: Tensor, by_BL: Tensor, places: Places) -> Tensor:
    """Rotate x by `by_BL` more positions, without applying YaRN's attention factor a second time."""
    return apply_rope(RopeInputs(x, *rope_table(by_BL, places.channels, replace(places.rope, attention=1.0))))


def _scores(q_BQHK: Tensor, k_BSGK: Tensor, seen: Tensor) -> Tensor:
    q_BQGAK = at_least_fp32(q_BQHK).unflatten(2, (k_BSGK.shape[2], -1))
    scores_BGAQS = torch.einsum("bqgak,bsgk->bgaqs", q_BQGAK, at_least_fp32(k_BSGK))
    return scores_BGAQS.masked_fill(~seen[:, None, None], -torch.inf)
