"""The functions of flash-attn 2 that are called here, with the parameters of version 2.8.3; nothing is computed."""

from __future__ import annotations

from torch import Tensor

from hybridtron.rehearse.attention_work import attend


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Rows as one batch: (B, L, H, K)."""
    return attend("flash", q, k, v, causal, window_size[0])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Documents side by side: (tokens, H, K). How long they are is not known here: each counts as the longest."""
    q_BLHK = q.unflatten(0, (-1, max_seqlen_q))
    k_BLGK, v_BLGK = (x.unflatten(0, (-1, max_seqlen_k)) for x in (k, v))
    return attend("flash", q_BLHK, k_BLGK, v_BLGK, causal, window_size[0]).flatten(0, 1)
