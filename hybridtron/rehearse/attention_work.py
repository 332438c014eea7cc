"""Simulated attention kernels: the tensors that other packages' kernels save and return, their bytes and FLOPs.

Like the real kernels they save q, k, v, the output and one fp32 number per query and head for the backward pass, which
also allocates a sum per query and head and an fp32 gradient of q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.rehearse import heard
from hybridtron.rehearse.stand_ins import Given

# matrix products of a pass: of queries with keys, or of attention weights with values
FORWARD = 2
BACKWARD = 5


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, before: int) -> Tensor:
    """Return an attention output without values, and report the kernels of both passes.

    Heads are (B, L, H, K). With `causal` a query sees `before` keys in addition to its own, or all earlier keys if
    `before` is negative.
    """
    return _AttentionWork.apply(name, q, k, v, causal, before)


class _AttentionWork(torch.autograd.Function):
    """Autograd function with the allocations of a fused attention kernel; it reports each pass."""

    @staticmethod
    def forward(ctx: Any, name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, before: int) -> Tensor:
        y = torch.empty_like(q)
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.name = name
        ctx.seen = (causal, before)
        _report(f"{name} forward", (q, k, v), (y, sums), *ctx.seen, products=FORWARD)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        if grads[0].stride(-1) == 1:
            grad = grads[0]
        else:
            grad = grads[0].contiguous()
        grad_q_fp32 = q.new_empty(q.shape, dtype=torch.float32)
        dots = torch.empty_like(sums)
        input_grads = [torch.empty_like(x) for x in (q, k, v)]
        written = (*input_grads, grad_q_fp32, grad_q_fp32, dots)
        _report(f"{ctx.name} backward", (q, k, v, y, sums, grad), written, *ctx.seen, products=BACKWARD)
        return None, *input_grads, None, None


def rows(name: str, given: Given) -> Tensor:
    """Simulate a call of the package's function for batched rows, (B, L, H, K)."""
    before = given.get("window_size", (-1, -1))[0]
    q, k, v = (given[part] for part in "qkv")
    return attend(name, q, k, v, given.get("causal", False), -1 if before is None else before)


def documents(name: str, given: Given) -> Tensor:
    """Simulate a call of the package's function for documents side by side, (tokens, H, K).

    Their lengths are not known here: each counts as the longest.
    """
    longest = given["max_seqlen_q"], given["max_seqlen_k"], given["max_seqlen_k"]
    in_rows = {part: given[part].unflatten(0, (-1, length)) for part, length in zip("qkv", longest, strict=True)}
    return rows(name, {**given, **in_rows}).flatten(0, 1)


flash_rows = partial(rows, "flash")
flash_documents = partial(documents, "flash")
flash3_rows = partial(rows, "flash-3")
flash3_documents = partial(documents, "flash-3")


def flash4_rows(given: Given) -> tuple[Tensor, None]:
    """Simulate a version 4 call for batched rows.

    That version returns a pair: the output, and the log-sum-exps if the call asks for them (here None).
    """
    return rows("flash-4", given), None


def flash4_documents(given: Given) -> tuple[Tensor, None]:
    """Simulate a version 4 call for documents side by side. Returns the output and None."""
    return documents("flash-4", given), None


def flex_kernel(window: int | None) -> Callable[..., Tensor]:
    """Return a stand-in for compiled FlexAttention, which sees all keys if `window` is None.

    Only a real device knows which tiles the mask selects: those of the window count.
    """
    before = -1 if window is None else window - 1

    def attend_to_window(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, block_mask: Any, enable_gqa: bool) -> Tensor:
        q_BLHK, k_BSGK, v_BSGK = (x.transpose(1, 2) for x in (q_BHLK, k_BGSK, v_BGSK))
        return attend("flex", q_BLHK, k_BSGK, v_BSGK, causal=True, before=before).transpose(1, 2)

    return attend_to_window


def _report(
    name: str, read: Sequence[Tensor], written: Sequence[Tensor], causal: bool, before: int, products: int
) -> None:
    moved = sum(x.numel() * x.element_size() for x in (*read, *written))
    batch, queries, heads, size = read[0].shape
    pairs = seen_pairs(queries, read[1].shape[1], causal, before)
    heard.runs(name, moved, 2 * products * batch * heads * size * pairs, "attention")


def seen_pairs(queries: int, keys: int, causal: bool, before: int) -> int:
    """Count the pairs of a query and a key that it sees; the last query is at the last key."""
    if not causal:
        return queries * keys
    most = keys if before < 0 else min(before + 1, keys)
    first = keys - queries + 1  # keys that the first query may see
    growing = max(0, most - first)  # queries that see one key more than the query before
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * most
