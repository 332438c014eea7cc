"""Compiled attention (`attention.h`) as an autograd function, for windows, packed documents and span attention alike.

Queries are computed in pieces: up to `most_queries()` consecutive tokens of a row. Forward keeps its inputs, its output
and the log-sum-exp of every query, as flash attention does.

Legend: B rows, L tokens, H query heads, G key/value heads, K head size, S keys of which the row's own are the last L;
P pieces, C places of chosen blocks.
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

WORTH = 2**14  # entries of the queries that repay one more thread


class AttentionPlan(NamedTuple):
    """The tokens of each piece and the keys that they read, in int64: fields of `Attention` in attention.h."""

    pieces_P5: Tensor  # row, first token, number of tokens, place of its chosen blocks, number of chosen blocks
    begins: Tensor  # (B + 1,): index of each row's first piece
    first_BL: Tensor  # index among all keys of the first that a query reads besides chosen blocks
    chosen_CG: Tensor | None = None  # first key of a chosen block; negative for none
    block: int = 0


class AttentionTask(ctypes.Structure):
    """`Attention` in attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "keys", "heads", "groups", "size", "block")),
        *((name, Tokens) for name in ("q", "k", "v", "y", "grad_y", "grad_q", "grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("pieces", "begins", "first", "chosen", "lse")),
        ("scale", ctypes.c_double),
    )


def attend(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the heads' outputs (B, L, H, K), in the type of the queries."""
    return _NativeAttention.apply(plan, q_BLHK, k_BSGK, v_BSGK)


@functools.lru_cache(maxsize=16)
def whole_rows(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Cut rows into pieces of maximum length; return these (B, N, 5) and the index of each row's first piece."""
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
    """Autograd function that keeps inputs, output and log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, plan: AttentionPlan, *given: Tensor) -> Tensor:
        q_BLHK, k_BSGK, v_BSGK = (readable(x) for x in given)
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
        q_BLHK, k_BSGK, v_BSGK, *outputs = ctx.saved_tensors  # read once: recomputation returns it only once
        wide = wide_type(q_BLHK)
        grad_y_BLHK = readable(grads[0])
        grad_q_BLHK = like(q_BLHK)
        grad_k_BSGK, grad_v_BSGK = (like(x, wide).zero_() for x in (k_BSGK, v_BSGK))  # several pieces add to them
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
