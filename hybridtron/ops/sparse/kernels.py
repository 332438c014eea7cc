"""The launches of the Triton kernels of sparse attention (`kernels_forward`, `kernels_backward`).

What decides who sees whom is made once for both passes: orders of keys and queries, and a few whole numbers of each
token. Nothing of it waits for the device, and no part's tiles depend on what tensors hold. Backward keeps the inputs,
the outputs and log-sum-exps. A product's factors are rounded to the type of q, k and v where that is bf16, summed in
fp32; fp16 goes through tf32, which holds it exactly; fp32 stays fp32. The same call gives the same bits again.
Right on an H200 (benchmarks/gpu.md).

Legend: as in `kernels_forward`.
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

# To a type checker a kernel is the Python function that it is written as, which can't be launched.
forward_kernels: Any = kernels_forward
backward_kernels: Any = kernels_backward


@dataclass(frozen=True)
class PairTiles:
    """Queries and keys of a tile, values that a program holds at a time, and its warps."""

    queries: int
    keys: int
    values: int
    warps: int = 4


def tiles(dtype: torch.dtype, size: int) -> PairTiles:
    """Chosen so that ptxas spills no registers for an H100; fp32's products run without tensor cores."""
    if dtype == torch.bfloat16:
        return PairTiles(64, 64, 128, warps=8) if size <= 64 else PairTiles(64, 32, 64, warps=8)
    return PairTiles(16, 16, 32) if dtype == torch.float32 and size > 16 else PairTiles(32, 32, 32)


class KernelPart(NamedTuple):
    """One part of who sees whom, as the kernels read it, in int32.

    Tiles of queries follow queries_RL; what each sees is a run of the order `keys` (R, S), or of kept keys a list of
    its own (R, T, W). Tiles of keys follow grouped_RS; the queries that see the key at one of its places stand in
    queries_RL from from_RS on and before to_RS. Of a stretch: first_RL, end_RL, by query; of kept keys: until_RS.
    `most` is how many keys a query sees; the kernels take it for the rehearsal, which models their loops by it.
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
    """q, k and v in one type, the widest of theirs."""
    q, k, v, seen = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q, k, v)))
    with torch.no_grad():
        block = tiles(shared, q.shape[2])
        parts = [of_stretch(part, most) for part, most in stretches_of(seen, q.shape[1])]
        if seen.scores_RS is not None:
            parts.append(of_best(seen, q.shape[1], block.queries))
        rank_RS = inverse(parts[0].grouped_RS.long()).int()  # used where there is a second part
    return _TritonSparse.apply(*(t.to(shared).contiguous() for t in (q, k, v)), parts, rank_RS).to(v.dtype)


def of_stretch(part: Stretch, most: int) -> KernelPart:
    """In the order of their ends, queries that see a key follow one another, as what they see begins in that order."""
    total = part.order_RS.shape[1]
    queries_RL = (part.end_RL * (total + 1) + part.first_RL).argsort(dim=1, stable=True)
    first_RL, end_RL = (x_RL.gather(1, queries_RL) for x_RL in (part.first_RL, part.end_RL))
    place_RS = torch.arange(total, device=end_RL.device).expand_as(part.order_RS).contiguous()
    from_RS, to_RS = (torch.searchsorted(x_RL, place_RS, right=True) for x_RL in (end_RL, first_RL))
    order_RS = part.order_RS
    found = queries_RL, order_RS, order_RS, from_RS, to_RS, part.first_RL, part.end_RL, order_RS
    return KernelPart(False, most, *(x.int().contiguous() for x in found))


def of_best(seen: Seen, length: int, queries: int) -> KernelPart:
    """Keys that stay among the best about equally long share tiles."""
    documents_RS, scores_RS, most = seen.documents_RS.int().contiguous(), seen.scores_RS, seen.budget.best
    assert scores_RS is not None
    (rows, total), device = documents_RS.shape, documents_RS.device
    past, count = total - length, ceil_div(length, queries)
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
    """Keeps its inputs, the outputs and a log-sum-exp of each query."""

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
    """The launches of all rows."""

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
        """Programs among which the values are divided."""
        return ceil_div(self.v_RSP.shape[2], self.values)

    @property
    def values(self) -> int:
        return min(self.tiles.values, max(16, power_of_2(self.v_RSP.shape[2])))

    def numbers(self, part: KernelPart) -> tuple[Tensor, ...]:
        """What decides who sees whom in a part, and what the first part has shown."""
        first = self.parts[0]
        return part.first_RL, part.end_RL, part.until_RS, first.first_RL, first.end_RL, self.rank_RS

    def constants(self, index: int) -> dict[str, Any]:
        size, block = self.q_RLN.shape[2], self.tiles
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
        """Programs, and L, S, entries of a tile's list, keys that a query sees."""
        rows, length, _ = self.q_RLN.shape
        sizes = length, self.k_RSN.shape[1], part.keys.shape[-1], part.most
        return rows * ceil_div(length, self.tiles.queries), sizes

    def by_keys(self, part: KernelPart) -> tuple[int, tuple[int, ...]]:
        rows, total, _ = self.k_RSN.shape
        return rows * ceil_div(total, self.tiles.keys), (self.q_RLN.shape[1], total, part.most)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """y and log-sum-exps; what the first of two parts gives stays in fp32."""
        rows, length, _ = self.q_RLN.shape
        shape, last = (rows, length, self.v_RSP.shape[2]), len(self.parts) - 1
        y = sums_RL = self.q_RLN.new_empty(rows, length, dtype=torch.float32)
        for index, part in enumerate(self.parts):
            before_y, before_sums_RL = y, sums_RL
            y = self.v_RSP.new_empty(shape, dtype=self.v_RSP.dtype if index == last else torch.float32)
            sums_RL = torch.empty_like(before_sums_RL)
            programs, sizes = self.by_queries(part)
            forward_kernels.attend[(programs, self.slices)](
                self.q_RLN, self.k_RSN, self.v_RSP, part.queries_RL, part.keys, *self.numbers(part), before_y,
                before_sums_RL, y, sums_RL, *sizes, **self.constants(index),
            )  # fmt: skip
        return y, sums_RL

    def gradients(self, y: Tensor, sums_RL: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """dq, dk and dv, of their types."""
        along_RL, size = torch.empty_like(sums_RL), self.v_RSP.shape[2]
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
            runs = part.queries_RL, part.grouped_RS, part.from_RS, part.to_RS
            backward_kernels.key_gradients[(programs,)](
                self.q_RLN, self.k_RSN, self.v_RSP, *runs, *self.numbers(part), sums_RL, dy, along_RL, grads[1], *sizes,
                **constants,
            )  # fmt: skip
            backward_kernels.value_gradients[(programs, self.slices)](
                self.q_RLN, self.k_RSN, *runs, *self.numbers(part), sums_RL, dy, grads[2], *sizes, **constants
            )
        of_q, of_k, of_v = (grad.to(self.q_RLN.dtype) for grad in grads)
        return of_q, of_k, of_v
