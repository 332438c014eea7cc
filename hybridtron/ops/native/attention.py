"""Autograd function for the compiled attention on CPUs (`attention.h`), with windows, documents and span attention.

A row's queries are divided into pieces with at most `most_queries()` consecutive tokens. In span attention, blocks of
earlier keys are chosen for a piece, and the piece's queries also see these blocks. As in FlashAttention, the backward
pass gets the inputs, the output and each query's log-sum-exp.

Legend: B rows (sequences in the batch), L tokens per row, H query heads, G key/value heads, K channels per head, S keys
per row (remembered tokens before the row, then its L tokens), P pieces in all rows together, N pieces per row in
`whole_rows`, C entries in the list of chosen blocks.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.native.library import call, constant, threads
from hybridtron.ops.native.tensors import Tokens, address, like, readable, scalar
from hybridtron.ops.precision import wide_type

WORTH = 2**14  # query elements per thread: with fewer, an additional thread gains no time


class AttentionPlan(NamedTuple):
    """The pieces, and the keys that their queries see, as int64 tensors, for `AttentionTask`.

    pieces_P5: for each piece, its row, first token, token count, first entry in chosen_CG, and number of chosen blocks
    begins: (B + 1,); row b has the pieces from begins[b] to begins[b + 1] - 1
    first_BL: for each query, the index of the first key that it sees outside chosen blocks; it sees all keys from this
        index to its own key
    chosen_CG: index of each chosen block's first key; negative if there is no block
    block: tokens per chosen block
    """

    pieces_P5: Tensor
    begins: Tensor
    first_BL: Tensor
    chosen_CG: Tensor | None = None
    block: int = 0


class AttentionTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Attention` in attention.h.

    rows, length, keys, heads, groups, size: B, L, S, H, G, K
    q, k, v, y: inputs and output
    grad_...: gradients
    pieces, begins, first, chosen, block: the fields in `AttentionPlan`
    lse: each query's log-sum-exp (B, H, L), an output of the forward pass
    scale: factor for the scores
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "keys", "heads", "groups", "size", "block")),
        *((name, Tokens) for name in ("q", "k", "v", "y", "grad_y", "grad_q", "grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("pieces", "begins", "first", "chosen", "lse")),
        ("scale", ctypes.c_double),
    )


def attend(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the attention output (B, L, H, K), in the queries' dtype."""
    return _NativeAttention.apply(plan, q_BLHK, k_BSGK, v_BSGK)


@functools.lru_cache(maxsize=16)
def whole_rows(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the pieces (B, N, 5) and `begins` for an `AttentionPlan` whose pieces are as long as possible."""
    starts_N = torch.arange(0, length, most_queries())
    counts_N = (length - starts_N).clamp(max=most_queries())
    pieces_BN5 = torch.zeros(rows, len(starts_N), 5, dtype=torch.int64)
    pieces_BN5[:, :, 0] = torch.arange(rows)[:, None]
    pieces_BN5[:, :, 1] = starts_N
    pieces_BN5[:, :, 2] = counts_N
    return pieces_BN5, torch.arange(rows + 1) * len(starts_N)


def most_queries() -> int:
    """Return the maximum number of tokens in a piece."""
    return constant("attention_piece")


class _NativeAttention(torch.autograd.Function):
    """Autograd function that saves the inputs, the output and the log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, plan: AttentionPlan, *tensors: Tensor) -> Tensor:
        q_BLHK, k_BSGK, v_BSGK = (readable(x) for x in tensors)
        y_BLHK = like(q_BLHK)
        wide = wide_type(q_BLHK)
        lse_BHL = torch.empty(len(q_BLHK), q_BLHK.shape[2], q_BLHK.shape[1], dtype=wide)
        ctx.save_for_backward(q_BLHK, k_BSGK, v_BSGK, y_BLHK, lse_BHL)
        ctx.plan = plan
        task = _task(plan, q_BLHK, k_BSGK, v_BSGK, y_BLHK, lse_BHL)
        call(f"attention_forward_{scalar(wide)}", task, threads(q_BLHK.numel() / WORTH))
        return y_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BLHK, k_BSGK, v_BSGK, *outputs = ctx.saved_tensors  # torch.utils.checkpoint allows one access
        wide = wide_type(q_BLHK)
        grad_y_BLHK = readable(grads[0])
        grad_q_BLHK = like(q_BLHK)
        # zeros, because several pieces add to the gradients for the same key and value
        grad_k_BSGK, grad_v_BSGK = (like(x, wide).zero_() for x in (k_BSGK, v_BSGK))
        task = _task(ctx.plan, q_BLHK, k_BSGK, v_BSGK, *outputs)
        task.grad_y, task.grad_q = Tokens.of(grad_y_BLHK), Tokens.of(grad_q_BLHK)
        task.grad_k, task.grad_v = Tokens.of(grad_k_BSGK), Tokens.of(grad_v_BSGK)
        call(f"attention_backward_{scalar(wide)}", task, threads(q_BLHK.numel() / WORTH))
        return None, grad_q_BLHK, grad_k_BSGK.to(k_BSGK.dtype), grad_v_BSGK.to(v_BSGK.dtype)


def _task(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> AttentionTask:
    rows, length, heads, size = q.shape
    return AttentionTask(
        rows=rows, length=length, keys=k.shape[1], heads=heads, groups=k.shape[2], size=size, block=plan.block,
        q=Tokens.of(q), k=Tokens.of(k), v=Tokens.of(v), y=Tokens.of(y), pieces=address(plan.pieces_P5),
        begins=address(plan.begins), first=address(plan.first_BL), chosen=address(plan.chosen_CG), lse=address(lse),
        scale=size**-0.5,
    )  # fmt: skip
