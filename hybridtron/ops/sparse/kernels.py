"""Launches of sparse attention's Triton kernels (`kernels_forward`, `kernels_backward`).

In sparse attention, rules select the keys that a query sees: the recent, first or strided keys, the keys in the query's
hash bin, or the keys with the best scores (`reference`). A part is the pairs (query, key) that one rule selects; there
are at most two parts. The kernels read no mask over pairs. They read sorted queries and keys, and a few integers per
token (`KernelPart`). From the integers they compute whether a pair is visible. The tensors of a `KernelPart` are
computed once for both passes. Their sizes do not depend on tensors' contents, so the host never waits for the device.
The inputs, the outputs, and each query's log-sum-exp over its scores are saved for the backward pass. Results are
deterministic. The kernels were checked on an H200 (benchmarks/gpu.md).

The widest dtype of q, k and v decides the precision of matrix multiplications. For bf16, both factors are cast to bf16.
For fp16, tf32 is used, which represents fp16 numbers exactly. For fp32, factors stay fp32. Accumulation is always fp32.

Legend: R rows (a row for each sequence in the batch and each head group), L queries, S keys (remembered keys of the
row's first document, then the row's L keys), N key size, P value size, T query tiles, Q queries in a tile, W keys that
are listed for a tile, K best keys in a list.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, power_of_2
from hybridtron.ops.sparse import kernels_backward, kernels_forward
from hybridtron.ops.sparse.parts import Stretch, inverse, stretches_of
from hybridtron.ops.sparse.reference import Seen, SparseInputs
from hybridtron.ops.ssd.kernels_row import products_of

# A type checker sees a kernel as a Python function, which can't be launched. `Any` turns this check off.
forward_kernels: Any = kernels_forward
backward_kernels: Any = kernels_backward


@dataclass(frozen=True)
class PairTiles:
    """Tile sizes: queries and keys per tile, channels of v that a program loads at a time, warps per program."""

    queries: int
    keys: int
    values: int
    warps: int = 4


def tiles(dtype: torch.dtype, size: int) -> PairTiles:
    """Return tile sizes for which ptxas spills no registers on an H100.

    `size` counts the channels per key. Tiles are small for fp32, since fp32 multiplications run without tensor cores.
    """
    if dtype == torch.bfloat16:
        return PairTiles(64, 64, 128, warps=8) if size <= 64 else PairTiles(64, 32, 64, warps=8)
    return PairTiles(16, 16, 32) if dtype == torch.float32 and size > 16 else PairTiles(32, 32, 32)


class KernelPart(NamedTuple):
    """The visible pairs of one rule (a part) in the form that the kernels read, as int32 tensors.

    There are two kinds of parts (`parts`). In a stretch, keys are sorted, and a query sees a contiguous range of the
    sorted keys. In the kept part (rule `best`), a key is seen from its own token on, until it is no longer among the
    best keys. The fields:

        kept      True for the kept part, False for a stretch
        most      the maximum number of keys that a query sees; only a simulation without a GPU reads it
        queries   the queries, sorted; consecutive queries form query tiles
        keys      stretch: all keys, sorted (R, S), of which a query tile reads a range
                  kept part: a list of keys for each query tile (R, T, W)
        grouped   all keys, sorted; consecutive keys form key tiles
        from, to  key grouped[p] is seen only by the queries in `queries[from[p] : to[p]]`
        first,
        end       stretch: query l sees the keys at positions first[l] to end[l] - 1 in `keys`
        until     kept part: key s is seen by the queries of the tokens s to until[s] - 1; tokens are numbered like
                  their keys

    Kernels read neither `until` of a stretch, nor `first` and `end` of the kept part.
    """

    kept: bool
    most: int
    queries_RL: Tensor
    keys: Tensor
    grouped_RS: Tensor
    from_RS: Tensor
    to_RS: Tensor
    first_RL: Tensor
    end_RL: Tensor
    until_RS: Tensor


def sparse_attention(inputs: SparseInputs) -> Tensor:
    """Return the attention output in v's dtype, computed with q, k and v in their widest common dtype."""
    q, k, v, seen = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q, k, v)))
    with torch.no_grad():
        block = tiles(shared, q.shape[2])
        parts = [of_stretch(part, most) for part, most in stretches_of(seen, q.shape[1])]
        if seen.scores_RS is not None:
            parts.append(of_best(seen, q.shape[1], block.queries))
        # The launch for a second part reads each key's place in the first part's order, to skip pairs of that part.
        rank_RS = inverse(parts[0].grouped_RS.long()).int()
    return _TritonSparse.apply(*(t.to(shared).contiguous() for t in (q, k, v)), parts, rank_RS).to(v.dtype)


def of_stretch(part: Stretch, most: int) -> KernelPart:
    """Build a kernel part from a stretch, with queries sorted by the ends of their key ranges.

    In that order the ranges' beginnings ascend too, so the queries that see a key are consecutive.
    """
    total = part.order_RS.shape[1]
    queries_RL = (part.end_RL * (total + 1) + part.first_RL).argsort(dim=1, stable=True)
    first_RL, end_RL = (x_RL.gather(1, queries_RL) for x_RL in (part.first_RL, part.end_RL))
    place_RS = torch.arange(total, device=end_RL.device).expand_as(part.order_RS).contiguous()
    from_RS, to_RS = (torch.searchsorted(x_RL, place_RS, right=True) for x_RL in (end_RL, first_RL))
    order_RS = part.order_RS
    tensors = queries_RL, order_RS, order_RS, from_RS, to_RS, part.first_RL, part.end_RL, order_RS
    return KernelPart(False, most, *(x.int().contiguous() for x in tensors))


def of_best(seen: Seen, length: int, queries: int) -> KernelPart:
    """Build the kernel part for the rule `best`; a tile has `queries` queries.

    A program for a key tile reads all queries that see any key in the tile. To make these queries few, a tile groups
    keys that stay among the best about equally long.
    """
    documents_RS = seen.documents_RS.int().contiguous()
    scores_RS = seen.scores_RS
    most = seen.budget.best
    assert scores_RS is not None
    rows, total = documents_RS.shape
    device = documents_RS.device
    past = total - length
    count = ceil_div(length, queries)
    before = ceil_div(past, queries)
    lists_RTK = torch.full((rows, before + count + 1, most), -1, dtype=torch.int32, device=device)
    until_RS = torch.zeros(rows, total, dtype=torch.int32, device=device)
    forward_kernels.best_keys[(rows,)](
        documents_RS, scores_RS.float().contiguous(), until_RS, lists_RTK, total, past, before, count, most,
        QUERIES=queries, SLOTS=max(16, power_of_2(most)), num_warps=8,
    )  # fmt: skip
    until_RS = torch.minimum(until_RS, torch.searchsorted(documents_RS, documents_RS, right=True, out_int32=True))
    query_L, index_S = (torch.arange(size, dtype=torch.int32, device=device) for size in (length, total))
    own_TQ = torch.arange(count * queries, dtype=torch.int32, device=device).view(count, queries) + past
    own_RTQ = torch.where(own_TQ < total, own_TQ, -1).expand(rows, -1, -1)
    lists_RTW = torch.cat((lists_RTK[:, before:-1], own_RTQ), dim=2)
    lives_RS = (until_RS - index_S.clamp(min=past)).clamp(min=0)
    alike_RS = torch.frexp(lives_RS / queries).exponent.clamp(min=0)
    grouped_RS = (alike_RS * total + index_S).argsort(dim=1).int()
    from_RS = (grouped_RS - past).clamp(min=0)
    to_RS = until_RS.gather(1, grouped_RS.long()) - past
    query_RL = query_L.expand(rows, -1).contiguous()
    return KernelPart(
        True, most, query_RL, lists_RTW.contiguous(), grouped_RS, from_RS, to_RS, query_RL, query_RL, until_RS
    )


class _TritonSparse(torch.autograd.Function):
    """Autograd function that saves its inputs, its outputs and each query's log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[KernelPart], rank_RS: Tensor) -> Tensor:
        row = SparseKernelRow(q, k, v, parts, rank_RS)
        y, sums_RL = row.outputs()
        ctx.save_for_backward(q, k, v, y, sums_RL)
        ctx.parts = parts, rank_RS
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums_RL = ctx.saved_tensors
        row = SparseKernelRow(q, k, v, *ctx.parts)
        return *row.gradients(y, sums_RL, dy.to(y.dtype).contiguous()), None, None


class SparseKernelRow(NamedTuple):
    """The tensors for all rows, and the launches of the forward and backward kernels.

    `rank_RS` is each key's position among the first part's sorted keys.
    """

    q_RLN: Tensor
    k_RSN: Tensor
    v_RSP: Tensor
    parts: Sequence[KernelPart]
    rank_RS: Tensor

    @property
    def tiles(self) -> PairTiles:
        return tiles(self.q_RLN.dtype, self.q_RLN.shape[2])

    @property
    def slices(self) -> int:
        """Number of programs among which v's channels are divided."""
        return ceil_div(self.v_RSP.shape[2], self.values)

    @property
    def values(self) -> int:
        """Number of v's channels that a program loads at a time."""
        return min(self.tiles.values, max(16, power_of_2(self.v_RSP.shape[2])))

    def numbers(self, part: KernelPart) -> tuple[Tensor, ...]:
        """Return the tensors for visibility in this part, then the tensors for visibility in the first part.

        If this part is the first part, the kernels do not read the second group of tensors.
        """
        first = self.parts[0]
        return part.first_RL, part.end_RL, part.until_RS, first.first_RL, first.end_RL, self.rank_RS

    def constants(self, index: int) -> dict[str, Any]:
        """Return the constants for launching the part with this index: sizes, tiles and compiler options."""
        size = self.q_RLN.shape[2]
        block = self.tiles
        return {
            "KEPT": self.parts[index].kept,
            "EXCEPT": index > 0,
            "N": size,
            "P": self.v_RSP.shape[2],
            "QUERIES": block.queries,
            "KEYS": block.keys,
            "BLOCK_N": max(16, power_of_2(size)),
            "VALUES": self.values,
            "num_warps": block.warps,
            "num_stages": 1,
        } | products_of(self.q_RLN.dtype)

    def by_queries(self, part: KernelPart) -> tuple[int, tuple[int, ...]]:
        """Return the number of query tiles in all rows, and the kernel arguments L, S, W and `most`."""
        rows, length, _ = self.q_RLN.shape
        sizes = length, self.k_RSN.shape[1], part.keys.shape[-1], part.most
        return rows * ceil_div(length, self.tiles.queries), sizes

    def by_keys(self, part: KernelPart) -> tuple[int, tuple[int, ...]]:
        """Return the number of key tiles in all rows, and the kernel arguments L, S and `most`."""
        rows, total, _ = self.k_RSN.shape
        return rows * ceil_div(total, self.tiles.keys), (self.q_RLN.shape[1], total, part.most)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Return y and the log-sum-exps, computed part by part.

        The launch for a second part reads the first part's results and adds the second part's keys. In this case the
        first part's y is fp32.
        """
        rows, length, _ = self.q_RLN.shape
        shape = (rows, length, self.v_RSP.shape[2])
        last = len(self.parts) - 1
        y = sums_RL = self.q_RLN.new_empty(rows, length, dtype=torch.float32)
        for index, part in enumerate(self.parts):
            before_y = y
            before_sums_RL = sums_RL
            y = self.v_RSP.new_empty(shape, dtype=self.v_RSP.dtype if index == last else torch.float32)
            sums_RL = torch.empty_like(before_sums_RL)
            programs, sizes = self.by_queries(part)
            forward_kernels.attend[(programs, self.slices)](
                self.q_RLN, self.k_RSN, self.v_RSP, part.queries_RL, part.keys, *self.numbers(part), before_y,
                before_sums_RL, y, sums_RL, *sizes, **self.constants(index),
            )  # fmt: skip
        return y, sums_RL

    def gradients(self, y: Tensor, sums_RL: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """Return dq, dk and dv, in the inputs' dtype."""
        along_RL = torch.empty_like(sums_RL)
        size = self.v_RSP.shape[2]
        grads = [torch.empty_like(x, dtype=torch.float32) for x in (self.q_RLN, self.k_RSN, self.v_RSP)]
        backward_kernels.along_outputs[(ceil_div(along_RL.numel(), self.tiles.queries),)](
            y, dy, along_RL, along_RL.numel(), P=size, QUERIES=self.tiles.queries, VALUES=self.values
        )
        for index, part in enumerate(self.parts):
            constants = self.constants(index)
            programs, sizes = self.by_queries(part)
            backward_kernels.query_gradients[(programs,)](
                self.q_RLN, self.k_RSN, self.v_RSP, part.queries_RL, part.keys, *self.numbers(part), sums_RL, dy,
                along_RL, grads[0], *sizes, **constants,
            )  # fmt: skip
            programs, sizes = self.by_keys(part)
            backward_kernels.key_gradients[(programs,)](
                self.q_RLN, self.k_RSN, self.v_RSP, part.queries_RL, part.grouped_RS, part.from_RS, part.to_RS,
                *self.numbers(part), sums_RL, dy, along_RL, grads[1], *sizes, **constants,
            )  # fmt: skip
            backward_kernels.value_gradients[(programs, self.slices)](
                self.q_RLN, self.k_RSN, part.queries_RL, part.grouped_RS, part.from_RS, part.to_RS,
                *self.numbers(part), sums_RL, dy, grads[2], *sizes, **constants,
            )  # fmt: skip
        of_q, of_k, of_v = (grad.to(self.q_RLN.dtype) for grad in grads)
        return of_q, of_k, of_v
