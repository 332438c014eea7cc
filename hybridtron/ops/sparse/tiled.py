"""Sparse attention by tiles: part after part, a few tiles at a time, without a matrix over all pairs.

Every part has its own tiles; a later part leaves out the pairs of earlier ones. Sums are rescaled from part to part, as
flash attention does from block to block, and backward recomputes the weights from the kept log-sum-exps. Time and
memory are linear in L.

A later token may move a bin's keys to other positions in a tile. No bit of an earlier output depends on that: the
matrix product that sums the values also sums the weights, key after key, and an unseen key adds an exact zero. A sum
over the last axis would not do: it adds by SIMD lanes, which depend on a key's position.

Legend as in `reference` and `parts`.
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

AT_ONCE = 2**20
"""Entries of keys and values that are gathered at a time."""


def _steps(parts: Sequence[PatternPart], numbers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield some tiles at a time: query indices, key indices, and a mask of the pairs that no earlier part has.

    `numbers` is the size of a key and its value together.
    """
    for index, part in enumerate(parts):
        tiles = part.tiles()
        together = max(1, AT_ONCE // (tiles.keys_TW.shape[1] * numbers))
        for start in range(0, len(tiles.keys_TW), together):
            queries_TQ, keys_TW = some = Tiles(*(x[start : start + together] for x in tiles))
            visible_TQW = part.sees(some) & (queries_TQ >= 0)[..., None] & (keys_TW >= 0)[:, None]
            for earlier in parts[:index]:
                visible_TQW &= ~earlier.sees(some)
            yield queries_TQ, keys_TW, visible_TQW


def _scores(q_TQN: Tensor, k_TWN: Tensor, visible_TQW: Tensor) -> Tensor:
    return (q_TQN @ k_TWN.mT).masked_fill(~visible_TQW, -torch.inf)


def _finite(sums: Tensor) -> Tensor:
    """Replace -inf, the maximum or log-sum-exp of no score, by 0, so that it can be subtracted."""
    return sums.masked_fill(sums == -torch.inf, 0.0)[..., None]


class _TiledAttention(torch.autograd.Function):
    """Attention of queries (R L + 1, N) to keys (R S, N) and values (R S, P); the last query stands for empty slots."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[PatternPart]) -> Tensor:
        wide = wide_type(v)
        ones = v.new_ones(len(v), 1)  # the product with them sums the weights
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
            into = keys_TW.flatten().clamp(min=0)  # the weights of empty slots are 0
            of_k.index_add_(0, into, (of_scores_TQW.mT @ q_TQN).flatten(0, 1))
            of_v.index_add_(0, into, (weights_TQW.mT @ grad_TQP).flatten(0, 1))
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


@untraced  # the number of tiles depends on the tensors' values
def tiled(inputs: SparseInputs) -> Tensor:
    """Compute attention by tiles, with torch operations on any device."""
    q_RLN, k_RSN, v_RSP, seen = inputs
    rows, length, size = q_RLN.shape
    with torch.no_grad():
        parts = tuple(parts_of(seen, length))
    q = torch.cat((q_RLN.reshape(-1, size), q_RLN.new_zeros(1, size)))
    y = _TiledAttention.apply(q, k_RSN.flatten(0, 1), v_RSP.flatten(0, 1), parts)
    return y[:-1].view(rows, length, -1)


TILED = Implementation("tiled", tiled)
