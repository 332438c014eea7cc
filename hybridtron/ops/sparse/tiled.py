"""Sparse attention by tiles, in torch: time and memory are linear in L, since no matrix over all pairs is computed.

In sparse attention, rules select the keys that a query sees (`reference`). A part is the pairs (query, key) that one
rule selects. A tile is a few queries with the keys that they see in a part (`parts`). The loop computes part after
part, a few tiles at a time. A pair that is in several parts is computed only in the first of these parts. As in flash
attention, a query's running sums are rescaled when a tile has a larger score. The backward pass recomputes the
attention weights from the saved log-sum-exps.

An output must not depend on later tokens, not even in its last bit. But a later token may move the keys in a bin to
other positions in a tile. So the rounding of sums over keys must not depend on these positions. torch's sum over the
last axis does depend on them, because it adds in SIMD lanes. A matrix multiplication does not: it adds one key after
another, and an unseen key adds an exact zero. Therefore the attention weights are summed by the multiplication that
also sums the weighted values: the values get an additional channel of ones.

Legend: R rows (a row for each sequence in the batch and each head group), L queries, S keys (remembered keys of the
row's first document, then the row's L keys), N key size, P value size (in `rescaled_TQP`, it includes the channel of
ones), T tiles, Q queries per tile, W keys per tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.precision import at_least_fp32, wide_type
from hybridtron.ops.sparse.parts import PatternPart, Tiles, parts_of
from hybridtron.ops.sparse.reference import SparseInputs

GATHERED_ENTRIES = 2**20
"""Maximum number of elements that are gathered at a time, counting keys and values."""


def _steps(parts: Sequence[PatternPart], numbers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield a few tiles at a time: query indices, key indices, and a mask for the pairs to compute.

    The mask excludes the pairs in earlier parts. `numbers` is the sum of the key size and the value size.
    """
    for index, part in enumerate(parts):
        tiles = part.tiles()
        together = max(1, GATHERED_ENTRIES // (tiles.keys_TW.shape[1] * numbers))
        for start in range(0, len(tiles.keys_TW), together):
            queries_TQ, keys_TW = some = Tiles(*(x[start : start + together] for x in tiles))
            visible_TQW = part.sees(some) & (queries_TQ >= 0)[..., None] & (keys_TW >= 0)[:, None]
            for earlier in parts[:index]:
                visible_TQW &= ~earlier.sees(some)
            yield queries_TQ, keys_TW, visible_TQW


def _scores(q_TQN: Tensor, k_TWN: Tensor, visible_TQW: Tensor) -> Tensor:
    return (q_TQN @ k_TWN.mT).masked_fill(~visible_TQW, -torch.inf)


def _finite(sums: Tensor) -> Tensor:
    """Replace -inf by 0 in the sums, so that exp(score - sum) is never NaN, and add a last axis.

    `sums` are maxima or log-sum-exps. For a query without keys, the sum and all scores are -inf.
    """
    return sums.masked_fill(sums == -torch.inf, 0.0)[..., None]


class _TiledAttention(torch.autograd.Function):
    """Attention of queries (R * L + 1, N) to keys (R * S, N) and values (R * S, P).

    The last query is a dummy: padding in tiles has index -1, which selects the last query.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[PatternPart]) -> Tensor:
        wide = wide_type(v)
        ones = v.new_ones(len(v), 1)  # the matrix product of the weights and this channel is the weights' sum
        values = torch.cat((v, ones), dim=1)
        sums = torch.zeros(len(q), values.shape[1], dtype=wide, device=v.device)
        largest = torch.full((len(q),), -torch.inf, dtype=wide, device=v.device)
        for queries_TQ, keys_TW, visible_TQW in _steps(parts, k.shape[1] + values.shape[1]):
            scores_TQW = _scores(at_least_fp32(q[queries_TQ]), at_least_fp32(k[keys_TW]), visible_TQW)
            before_TQ = largest[queries_TQ]
            after_TQ = torch.maximum(before_TQ, scores_TQW.amax(-1))
            rescaled_TQP = sums[queries_TQ] * torch.exp(before_TQ[..., None] - _finite(after_TQ))
            weights_TQW = torch.exp(scores_TQW - _finite(after_TQ))
            sums[queries_TQ] = torch.baddbmm(rescaled_TQP, weights_TQW, at_least_fp32(values[keys_TW]))
            largest[queries_TQ] = after_TQ
        weighted_values = sums[:, :-1]
        total_weights = sums[:, -1]
        y = weighted_values / total_weights.where(total_weights > 0, 1)[:, None]
        ctx.save_for_backward(q, k, v, y, largest + total_weights.log())
        ctx.parts = parts
        return y.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros(x.shape, dtype=y.dtype, device=y.device) for x in (q, k, v))
        along = (y * grad).sum(-1)
        for queries_TQ, keys_TW, visible_TQW in _steps(ctx.parts, k.shape[1] + v.shape[1]):
            q_TQN, k_TWN, v_TWP = (at_least_fp32(x) for x in (q[queries_TQ], k[keys_TW], v[keys_TW]))
            grad_TQP = at_least_fp32(grad[queries_TQ])
            weights_TQW = torch.exp(_scores(q_TQN, k_TWN, visible_TQW) - _finite(sums[queries_TQ]))
            of_scores_TQW = weights_TQW * (grad_TQP @ v_TWP.mT - along[queries_TQ][..., None])
            of_q[queries_TQ] += of_scores_TQW @ k_TWN
            into = keys_TW.flatten().clamp(min=0)  # padding (-1) adds 0 to key 0, because its weights are 0
            of_k.index_add_(0, into, (of_scores_TQW.mT @ q_TQN).flatten(0, 1))
            of_v.index_add_(0, into, (weights_TQW.mT @ grad_TQP).flatten(0, 1))
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


@untraced  # the number of tiles depends on the tensors' values
def tiled(inputs: SparseInputs) -> Tensor:
    """Return the output (R, L, P), computed by tiles with torch operations on any device."""
    q_RLN, k_RSN, v_RSP, seen = inputs
    rows, length, size = q_RLN.shape
    with torch.no_grad():
        parts = tuple(parts_of(seen, length))
    q = torch.cat((q_RLN.reshape(-1, size), q_RLN.new_zeros(1, size)))
    y = _TiledAttention.apply(q, k_RSN.flatten(0, 1), v_RSP.flatten(0, 1), parts)
    return y[:-1].view(rows, length, -1)


TILED = Implementation("tiled", tiled)
