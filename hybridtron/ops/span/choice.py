"""The choice of past blocks in span-expanded attention: block summaries, their relevance, and the most relevant blocks.

A document is divided into chunks, and more finely into blocks. Each chunk selects earlier blocks to attend to:

    c_j  = mean over i in block j of  sum over l in block j of  softmax_l(q_i . k_l / sqrt(K)) v_l
    R_tj = sum over the query heads h of a group of  (sum over i in chunk t or t - 1 of q_i^h) . c_j^h

c_j is block j's summary. Each query head has its own c_j, computed without a causal mask. In the variant with landmarks
(SE-Attn-LM), one fixed vector per head replaces the block's queries q_i. R_tj is block j's relevance for chunk t,
summed over the query heads that share a key/value head (a group). A chunk reads the blocks with the largest R_tj; if
two blocks have equal relevance, the earlier block is preferred.

In the paper, the queries in R_tj come from chunk t. Then the choice makes a chunk's early tokens depend on its later
tokens. With the queries from chunk t - 1, no token depends on a later token.

There are two more differences from the paper. The paper applies a softmax to R; here it is left out, since it does not
change the blocks' order. The paper's equations have one head. Here each key/value head chooses its own blocks, so that
tensor-parallel ranks, which hold different heads, need no communication. Chosen blocks are integer indices, so no
gradient flows through this file.

Legend: R rows (sequences), N tokens, H query heads, G key/value heads, A = H / G query heads in a group, K head size, S
tokens in a block, T chunks, U blocks, C blocks chosen for a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32

MIXED = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""The multipliers of the random generator splitmix64, as int64."""
CPU_RUN_TOKENS = 1024
"""Number of tokens whose blocks are summarized together on a CPU."""


@torch.no_grad()
def summaries(q_RNHK: Tensor, k_RNGK: Tensor, v_RNGK: Tensor, block: int, landmarks_HK: Tensor | None) -> Tensor:
    """Return every complete block's summary c_j, (R, U, H, K), in fp32 (float64 for float64 inputs).

    A block has `block` tokens. `landmarks_HK` are the landmarks, or None to use the block's queries.
    """
    whole = k_RNGK.shape[1] // block * block
    # on a CPU, compute a few blocks at a time, so that intermediate results stay in the cache
    if q_RNHK.device.type == "cpu":
        run = max(block, CPU_RUN_TOKENS // block * block)
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
    """Return each block's summed queries, (R, U, H, K), in fp32 (float64 for float64 inputs).

    The last block may be incomplete.
    """
    missing = -q_RNHK.shape[1] % block
    return F.pad(at_least_fp32(q_RNHK), (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).sum(2)


@torch.no_grad()
def relevance(sums_RTHK: Tensor, summaries_RUHK: Tensor, groups: int) -> Tensor:
    """Return the relevance R_tj for each of `groups` key/value heads, (R, G, T, U).

    For every chunk t, `sums_RTHK` holds the sum of the queries that choose the chunk's blocks.
    """
    left, right = (x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(3) for x in (sums_RTHK, summaries_RUHK))
    return left @ right.mT


def random_relevance(key: int, rows: range, groups: Sequence[int], chunks: range, blocks: range) -> Tensor:
    """Return uniform random numbers in [0, 1) in place of relevances, (R, G, T, U).

    `key` is the seed. Each random number depends only on the seed and on the indices of its row, key/value head, chunk
    and block. The arguments `rows`, `groups`, `chunks` and `blocks` are these indices.
    """
    mixed = torch.tensor(key % 2**64 - (2**64 if key % 2**64 >= 2**63 else 0))
    for axis, numbers in enumerate((rows, groups, chunks, blocks)):
        numbers_N = torch.tensor(list(numbers), dtype=torch.int64).view(-1, *[1] * (3 - axis))
        mixed = _mix(mixed + (numbers_N + 1) * MIXED[0])
    return mixed.bitwise_and(2**53 - 1).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64; int64 overflow wraps around, as in splitmix64's unsigned arithmetic."""
    for shift, factor in ((30, MIXED[0]), (27, MIXED[1])):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's int64 shift fills with the sign bit."""
    return (x >> places) & (2 ** (64 - places) - 1)


@torch.no_grad()
def choose(relevance_RGTU: Tensor, available: Sequence[int], most: int) -> Tensor | None:
    """For each chunk, return up to `most` blocks: the most relevant blocks among the first `available` blocks.

    `available` has an entry for each chunk. The result has the blocks' indices (R, G, T, C) in ascending order,
    followed by -1 if a chunk has fewer than C blocks. The result is None if no chunk has a block to choose.
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
    # topk does not say which of several equal scores it takes, so the earlier blocks are selected here
    taken = (above | (equal & (equal.cumsum(-1) <= room))) & available_TU
    late = places_U.numel()
    chosen = torch.where(taken, places_U, late).topk(count, dim=-1, largest=False, sorted=True).values
    return torch.where(chosen == late, -1, chosen)
