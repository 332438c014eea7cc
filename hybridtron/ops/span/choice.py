"""The choice of past blocks in span-expanded attention: block summaries, their relevance, and the k most relevant.

    c_j  = mean over i in block j of  softmax over l in block j of (q_i . k_l / sqrt(K))  v_l,   not causal;
           with landmarks one fixed vector per head replaces the block's queries (SE-Attn-LM)
    R_tj = sum over the query heads h of a group of  (sum over i of q_i^h) . c_j^h

The summed queries are those of chunk t itself, as in the paper, or those of the chunk before it. With the first rule, a
chunk's early tokens depend on its later ones through the choice; with the second, no token depends on a later one. The
k blocks with the largest R_tj are read; ties go to the earlier block. The paper's softmax over R does not change the
order and is left out. Its equations have one head; with groups of heads each key/value head chooses for itself, so that
ranks with different heads need no communication. A choice is an index, so everything here runs without gradients.

Legend as in `reference`; N tokens, A query heads of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32

MIXED = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""The multipliers of splitmix64, as int64."""
AT_ONCE = 1024
"""Tokens whose blocks are summarized together on a CPU."""


@torch.no_grad()
def summaries(q_RNHK: Tensor, k_RNGK: Tensor, v_RNGK: Tensor, block: int, landmarks_HK: Tensor | None) -> Tensor:
    """Return c_j of every complete block, (R, U, H, K), in fp32 or float64."""
    whole = k_RNGK.shape[1] // block * block
    # on a CPU a few blocks at a time, so that intermediate results stay in the cache
    if q_RNHK.device.type == "cpu":
        run = max(block, AT_ONCE // block * block)
    else:
        run = max(block, whole)
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
    """Return the sum of each block's queries, (R, U, H, K), in fp32 or float64; the last block may be incomplete."""
    missing = -q_RNHK.shape[1] % block
    return F.pad(at_least_fp32(q_RNHK), (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).sum(2)


@torch.no_grad()
def relevance(sums_RTHK: Tensor, summaries_RUHK: Tensor, groups: int) -> Tensor:
    """Return R_tj of each group, (R, G, T, U)."""
    left, right = (x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(3) for x in (sums_RTHK, summaries_RUHK))
    return left @ right.mT


def random_relevance(key: int, rows: range, groups: Sequence[int], chunks: range, blocks: range) -> Tensor:
    """Return uniform numbers in [0, 1), (R, G, T, U): a pure function of the key, the row, group, chunk and block."""
    mixed = torch.tensor(key % 2**64 - (2**64 if key % 2**64 >= 2**63 else 0))
    for axis, numbers in enumerate((rows, groups, chunks, blocks)):
        numbers_N = torch.tensor(list(numbers), dtype=torch.int64).view(-1, *[1] * (3 - axis))
        mixed = _mix(mixed + (numbers_N + 1) * MIXED[0])
    return mixed.bitwise_and(2**53 - 1).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, with int64 arithmetic that wraps."""
    for shift, factor in ((30, MIXED[0]), (27, MIXED[1])):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift to the right logically, which torch's int64 can't do."""
    return (x >> places) & (2 ** (64 - places) - 1)


@torch.no_grad()
def choose(relevance_RGTU: Tensor, available: Sequence[int], most: int) -> Tensor | None:
    """Choose the most relevant blocks among each chunk's first `available` ones, at most `most` of them.

    Returns (R, G, T, C) in rising order, filled up with -1 for a chunk with fewer than C; None if no chunk has any.
    """
    count = min(most, max(available))
    if count == 0:
        return None
    device = relevance_RGTU.device
    places_U = torch.arange(relevance_RGTU.shape[-1], device=device)
    available_T = torch.tensor(available).to(device, non_blocking=True)  # the host need not wait for this copy
    available_TU = places_U < available_T[:, None]
    scores = relevance_RGTU.masked_fill(~available_TU, -torch.inf)
    least = scores.topk(count, dim=-1).values[..., -1:]
    above = scores > least
    equal = scores == least
    room = count - above.sum(-1, keepdim=True)
    taken = (above | (equal & (equal.cumsum(-1) <= room))) & available_TU  # topk guarantees no order among ties
    late = places_U.numel()
    chosen = torch.where(taken, places_U, late).topk(count, dim=-1, largest=False, sorted=True).values
    return torch.where(chosen == late, -1, chosen)
