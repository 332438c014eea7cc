"""Attention kernels of other packages in a rehearsal: what they keep, what they make, their bytes and their FLOPs.

Like the real ones they keep q, k, v, the output and a number per query and head (fp32) for the backward pass. That also
makes a sum of that shape and, in fp32, a gradient of q.
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

# products of queries and keys, or of weights and values
FORWARD = 2
BACKWARD = 5


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, before: int) -> Tensor:
    """Heads are (B, L, H, K); a query sees `before` keys besides its own, all where that is negative."""
    return _AttentionWork.apply(name, q, k, v, causal, before)


class _AttentionWork(torch.autograd.Function):
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
        wide = q.new_empty(q.shape, dtype=torch.float32)
        dots = torch.empty_like(sums)
        found = [torch.empty_like(x) for x in (q, k, v)]
        written = (*found, wide, wide, dots)
        _report(f"{ctx.name} backward", (q, k, v, y, sums, grad), written, *ctx.seen, products=BACKWARD)
        return None, *found, None, None


def rows(name: str, given: Given) -> Tensor:
    """A call of the package's function for rows as one batch: (B, L, H, K)."""
    before = given.get("window_size", (-1, -1))[0]
    q, k, v = (given[part] for part in "qkv")
    return attend(name, q, k, v, given.get("causal", False), -1 if before is None else before)


def documents(name: str, given: Given) -> Tensor:
    """For documents side by side: (tokens, H, K). How long they are is not known here: each counts as the longest."""
    longest = given["max_seqlen_q"], given["max_seqlen_k"], given["max_seqlen_k"]
    in_rows = {part: given[part].unflatten(0, (-1, length)) for part, length in zip("qkv", longest, strict=True)}
    return rows(name, {**given, **in_rows}).flatten(0, 1)


flash_rows = partial(rows, "flash")
flash_documents = partial(documents, "flash")
flash3_rows = partial(rows, "flash-3")
flash3_documents = partial(documents, "flash-3")


def flash4_rows(given: Given) -> tuple[Tensor, None]:
    """Version 4 gives the sums of exponentials beside the output, where it is asked for them."""
    return rows("flash-4", given), None


def flash4_documents(given: Given) -> tuple[Tensor, None]:
    """As for rows."""
    return documents("flash-4", given), None


def flex_kernel(window: int | None) -> Callable[..., Tensor]:
    """In place of FlexAttention compiled. Which tiles it reads only the device knows: those of the window count."""
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
    """Pairs of a query and a key that it sees; the last query stands at the last key."""
    if not causal:
        return queries * keys
    most = keys if before < 0 else min(before + 1, keys)
    first = keys - queries + 1  # keys that the first query may see
    growing = max(0, most - first)  # queries that see one more than the query before
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * most
