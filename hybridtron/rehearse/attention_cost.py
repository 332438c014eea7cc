"""Simulates other packages' attention kernels: the tensors that they save and return, and their bytes and FLOPs.

The simulated kernels replace the real kernels in a training step that is simulated without a GPU. For the backward
pass, they save the same tensors as the real kernels: q, k, v, the output, and the log-sum-exp of each query and head in
fp32. The backward pass also allocates two fp32 tensors: the gradient of q, and for each query and head the dot product
of the output and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.rehearse import events
from hybridtron.rehearse.package_stubs import Given

# number of matrix products in a pass; each product covers all pairs of a query and a key that the query sees
FORWARD = 2
BACKWARD = 5


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, before: int) -> Tensor:
    """Return an attention output without values, and report a kernel for each pass. `name` is the kernel's name.

    q, k and v are (B, L, H, K): sequences, tokens, heads, head size. k and v may have fewer heads than q.

    With `causal`, a query sees the key at its own position and `before` earlier keys, or all earlier keys if `before`
    is negative. Without `causal`, a query sees all keys.
    """
    return _AttentionCost.apply(name, q, k, v, causal, before)


class _AttentionCost(torch.autograd.Function):
    """Autograd function with the allocations of a fused attention kernel. Each pass is reported as one kernel."""

    @staticmethod
    def forward(ctx: Any, name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, before: int) -> Tensor:
        y = torch.empty_like(q)
        log_sum_exps = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, log_sum_exps)
        ctx.name = name
        ctx.seen = (causal, before)
        _report(f"{name} forward", (q, k, v), (y, log_sum_exps), *ctx.seen, products=FORWARD)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, log_sum_exps = ctx.saved_tensors
        if grads[0].stride(-1) == 1:
            grad = grads[0]
        else:
            grad = grads[0].contiguous()
        grad_q_fp32 = q.new_empty(q.shape, dtype=torch.float32)
        dots = torch.empty_like(log_sum_exps)
        input_grads = [torch.empty_like(x) for x in (q, k, v)]
        # grad_q_fp32 is read too: the last kernel casts it to q's dtype
        read = (q, k, v, y, log_sum_exps, grad, grad_q_fp32)
        written = (*input_grads, grad_q_fp32, dots)
        _report(f"{ctx.name} backward", read, written, *ctx.seen, products=BACKWARD)
        return None, *input_grads, None, None


def rows(name: str, arguments: Given) -> Tensor:
    """Simulate a call to flash-attn's function for sequences with equal lengths; q, k and v are (B, L, H, K)."""
    before = arguments.get("window_size", (-1, -1))[0]
    q, k, v = (arguments[part] for part in "qkv")
    return attend(name, q, k, v, arguments.get("causal", False), -1 if before is None else before)


def documents(name: str, arguments: Given) -> Tensor:
    """Simulate a call to flash-attn's function for documents with different lengths, concatenated to (tokens, H, K).

    Tensors have no values in a rehearsal, so the documents' lengths are unknown. All documents are assumed to have the
    maximum length.
    """
    longest = arguments["max_seqlen_q"], arguments["max_seqlen_k"], arguments["max_seqlen_k"]
    in_rows = {part: arguments[part].unflatten(0, (-1, length)) for part, length in zip("qkv", longest, strict=True)}
    return rows(name, {**arguments, **in_rows}).flatten(0, 1)


flash_rows = partial(rows, "flash")
flash_documents = partial(documents, "flash")
flash3_rows = partial(rows, "flash-3")
flash3_documents = partial(documents, "flash-3")


def flash4_rows(arguments: Given) -> tuple[Tensor, None]:
    """Simulate a call to flash-attn's version 4 for sequences with equal lengths. Return the output and None.

    The real function also returns None as its second value, unless its caller requests the log-sum-exps.
    """
    return rows("flash-4", arguments), None


def flash4_documents(arguments: Given) -> tuple[Tensor, None]:
    """Simulate a call to flash-attn's version 4 for concatenated documents. Return the output and None."""
    return documents("flash-4", arguments), None


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Simulate torch's `varlen_attn` as this package calls it: causal, in documents of the maximum length."""
    arguments = {"q": query, "k": key, "v": value, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return documents("flash", {**arguments, "causal": True, "window_size": window_size})


def flex_kernel(window: int | None, sizes: object = None) -> Callable[..., Tensor]:
    """Return a stub for compiled FlexAttention; the stub takes any `sizes`.

    A query sees the last `window` keys, its own included. If `window` is None, the query sees its own and all earlier
    keys. A mask may exclude tiles of queries and keys within the window. These tiles count too, because the mask's
    values are unknown in a rehearsal.

    Axes of the stub's arguments: B sequences, H query heads, G key/value heads, L queries, S keys, K head size.
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
    events.report_kernel(name, moved, 2 * products * batch * heads * size * pairs, "attention")


def seen_pairs(queries: int, keys: int, causal: bool, before: int) -> int:
    """Return the number of pairs (query, key) in which the query sees the key.

    The last query is at the position of the last key.
    """
    if not causal:
        return queries * keys
    most = keys if before < 0 else min(before + 1, keys)  # maximum number of keys that a query sees
    first = keys - queries + 1  # number of keys up to the first query's position
    # number of queries that see fewer than `most` keys: they see `first`, `first + 1`, `first + 2`, ... keys
    growing = max(0, most - first)
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * most
