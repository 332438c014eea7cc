"""Which blocks of the past a chunk of span-expanded attention reads: summaries, relevance, and the k most relevant.

    c_j  = mean over i in block j of  softmax over l in block j of (q_i . k_l / sqrt(K))  v_l,   in no causal order;
           with landmarks only one fixed vector per head asks instead of the block's queries (SE-Attn-LM)
    R_tj = sum over the query heads h of a group of  (sum over i of q_i^h) . c_j^h

The queries summed are those of chunk t itself, as in the paper, or those of the chunk before it. With the first, early
tokens of a chunk depend on later ones of the same chunk through the choice; with the second, no token does. The k
blocks of largest R_tj are read, of equals the earlier one. The paper's softmax over R changes no order and is left out.
Its equations have one head; with groups of heads each key/value head chooses for itself, so that ranks that share the
heads need no communication. A choice is an index: no gradient flows through it, and all here is without one.

Legend as in `reference`; N tokens, A query heads of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32

MIXED = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""The factors of splitmix64, as int64."""
AT_ONCE = 1024
"""Tokens that are summed up together on a CPU."""


@torch.no_grad()
def summaries(q_RNHK: Tensor, k_RNGK: Tensor, v_RNGK: Tensor, block: int, landmarks_HK: Tensor | None) -> Tensor:
    """c_j of every whole block, (R, U, H, K), in fp32 at least."""
    whole = k_RNGK.shape[1] // block * block
    # on a CPU so few blocks at a time that all of it stays in the cache
    run = max(block, AT_ONCE // block * block) if q_RNHK.device.type == "cpu" else max(block, whole)
    parts = zip(*(x[:, :whole].split(run, dim=1) for x in (q_RNHK, k_RNGK, v_RNGK)), strict=True)
    return torch.cat([_summaries(q, k, v, block, landmarks_HK) for q, k, v in parts], dim=1)


def _summaries(q_RNHK: Tensor, k_RNGK: Tensor, v_RNGK: Tensor, block: int, landmarks_HK: Tensor | None) -> Tensor:
    groups = k_RNGK.shape[2]
    shape = (k_RNGK.shape[1] // block, block)
    q, k, v = (at_least_fp32(x).unflatten(1, shape).transpose(2, 3) for x in (q_RNHK, k_RNGK, v_RNGK))
    if landmarks_HK is None:
        scores = q.unflatten(2, (groups, -1)).flatten(3, 4) @ k.mT * q.shape[-1] ** -0.5
        weights_RUGAS = scores.softmax(-1).unflatten(3, (-1, block)).mean(4)
    else:
        asking_GAK = at_least_fp32(landmarks_HK).to(k.dtype).unflatten(0, (groups, -1))
        weights_RUGAS = (asking_GAK @ k.mT * k.shape[-1] ** -0.5).softmax(-1)
    return (weights_RUGAS @ v).flatten(2, 3)


@torch.no_grad()
def query_sums(q_RNHK: Tensor, block: int) -> Tensor:
    """The sum of each block's queries, the last of which may be unfinished, (R, U, H, K), in fp32 at least."""
    missing = -q_RNHK.shape[1] % block
    return F.pad(at_least_fp32(q_RNHK), (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).sum(2)


@torch.no_grad()
def relevance(sums_RTHK: Tensor, summaries_RUHK: Tensor, groups: int) -> Tensor:
    """R_tj of each group, (R, G, T, U)."""
    left, right = (x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(3) for x in (sums_RTHK, summaries_RUHK))
    return left @ right.mT


def random_relevance(key: int, rows: range, groups: Sequence[int], chunks: range, blocks: range) -> Tensor:
    """Uniform numbers in [0, 1), (R, G, T, U): a pure function of the key, the row, group, chunk and block."""
    mixed = torch.tensor(key % 2**64 - (2**64 if key % 2**64 >= 2**63 else 0))
    for axis, numbers in enumerate((rows, groups, chunks, blocks)):
        numbers_N = torch.tensor(list(numbers), dtype=torch.int64).view(-1, *[1] * (3 - axis))
        mixed = _mix(mixed + (numbers_N + 1) * MIXED[0])
    return mixed.bitwise_and(2**53 - 1).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, with int64 arithmetic that wraps."""
    for shift, factor in ((30, MIXED[0]), (27, MIXED[1])):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """The logical shift to the right, which int64 does not have."""
    return (x >> places) & (2 ** (64 - places) - 1)


@torch.no_grad()
def choose(relevance_RGTU: Tensor, available: Sequence[int], most: int) -> Tensor | None:
    """The blocks of largest relevance among each chunk's first `available` ones, at most `most` of them.

    (R, G, T, C) in rising order, -1 behind the last where there are fewer than C; None where there are none at all.
    """
    count = min(most, max(available))
    if count == 0:
        return None
    device = relevance_RGTU.device
    places_U = torch.arange(relevance_RGTU.shape[-1], device=device)
    available_T = torch.tensor(available).to(device, non_blocking=True)  # the host need not wait for so small a copy
    available_TU = places_U < available_T[:, None]
    scores = relevance_RGTU.masked_fill(~available_TU, -torch.inf)
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    taken = (above | (equal & (equal.cumsum(-1) <= room))) & available_TU  # topk promises no order among equals
    late = places_U.numel()
    chosen = torch.where(taken, places_U, late).topk(count, dim=-1, largest=False, sorted=True).values
    return torch.where(chosen == late, -1, chosen)
