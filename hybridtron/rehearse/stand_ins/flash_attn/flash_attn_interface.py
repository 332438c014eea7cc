"""The functions of flash-attn 2 that are called here, with the parameters of version 2.8.3, for tensors without values.

Like the real ones they keep q, k, v, the output and a number per query and head (fp32) for the backward pass, which
also makes a sum of that shape and, in fp32, a gradient of q. What the kernels do is reported to the rehearsal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.rehearse.attention_work import attention_work


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        y, sums = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.seen = causal, window
        attention_work("flash_fwd", (q, k, v), (y, sums), *ctx.seen, products=2)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        wide, dots = q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(sums)
        found = [torch.empty_like(x) for x in (q, k, v)]
        attention_work("flash_bwd", (q, k, v, y, sums, grad), (*found, wide, wide, dots), *ctx.seen, products=5)
        return *found, None, None


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Rows as one batch: (B, L, H, K)."""
    return _FlashAttention.apply(q, k, v, causal, window_size)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Documents side by side: (tokens, H, K). How long they are is not known here: each counts as the longest."""
    return _FlashAttention.apply(
        q.unflatten(0, (-1, max_seqlen_q)), *(x.unflatten(0, (-1, max_seqlen_k)) for x in (k, v)), causal, window_size
    ).flatten(0, 1)
