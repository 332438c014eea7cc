"""Triton kernels for gated linear attention, backward: gradients for values, queries, keys and log decays.

The gradients are computed for one chunk of tokens at a time. h is the state before the chunk, and dh is the state
gradient after it; `chunk_states` and `pass_states` in `kernels_forward` compute both. Four products of the chunk's
decays are used, for each key channel:

    F_i     over the tokens up to i
    L_j     over the tokens after j
    E_ij    over the tokens after j, up to i
    W       over all tokens

F, L, E and W multiply vectors over key channels elementwise. The scores are A_ij = sum_n q_in E_ijn k_jn for j <= i.
The kernels here compute

    pair_weights       M_ij = dy_i . v_j for j <= i: the gradient for A_ij
    value_gradients    dv_j = sum_i A_ij dy_i + dh^T (L_j k_j)
    token_gradients    dq_i = sum_j M_ij E_ij k_j + F_i h dy_i
                       dk_j = sum_i M_ij E_ij q_i + L_j dh v_j
                       dg_t = sum_{i >= t > j} M_ij q_i E_ij k_j
                              + sum_{i >= t} F_i q_i h dy_i + sum_{j < t} L_j k_j dh v_j + W sum_p h dh

The kernel `pairs` in `kernels_pairs` computes the sums over j in dq_i and over i in dk_j, without the terms with i = j.
`token_gradients` reads them, and adds the terms with i = j, in which E is 1. The first sum in dg_t is computed as a
difference: the sum over all pairs with i >= t, minus the sum over all pairs with j >= t. Both sums are over pairs in
t's document and chunk. No kernel uses atomics, so results are deterministic.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels n, P value channels p, C chunks, T
tokens per chunk. Scores are (B, H, L, T), and states are (B, C, H, N, P).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.gla.kernels_forward import (
    begins,
    finite_decays,
    left_to_end,
    scores_of_chunk,
    state_block,
    sums_by_mask,
)
from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel


@triton.jit
def pair_weights(
    dy_BLHP: tl.tensor, v_BLHP: tl.tensor, weights_BHLT: tl.tensor, length: int, heads: int, P: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store M for one chunk and head, with zeros above the diagonal. Grid: (chunks, heads, rows)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    weight_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, BLOCK_P, VALUES):
        p_P = start + tl.arange(0, VALUES)
        dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
        v_TP = tokens_by_channel(v_BLHP, row, token_T, head, p_P, length, heads, P)
        weight_TT += product(dy_TP, tl.trans(v_TP), PRODUCT, PRECISION)
    weight_TT = tl.where(token_T[:, None] >= token_T[None, :], weight_TT, 0.0)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(weights_BHLT + at_TT, weight_TT, mask=(token_T < length)[:, None])


@triton.jit
def ends_later(
    starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, end: tl.tensor, length: int,
) -> tl.tensor:  # fmt: skip
    """Return for each token the number of document starts after it and before `end`.

    A token contributes to the state after the chunk only if this number is 0.
    """
    next_T = token_T + 1
    return tl.cumsum(tl.where(next_T < end, begins(starts_BL, row, next_T, length), 0), axis=0, reverse=True)


@triton.jit
def value_gradients(
    scores_BHLT: tl.tensor, k_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, dy_BLHP: tl.tensor,
    after_BCHNP: tl.tensor, grad_v_BLHP: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dv for a chunk's tokens and VALUES value channels. Grid: (chunks, heads * value slices, rows)."""
    across: tl.constexpr = BLOCK_P // VALUES
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    p_P = tl.program_id(1) % across * VALUES + tl.arange(0, VALUES)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    end = tl.minimum((chunk + 1) * CHUNK, length)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    kept_TP = tl.zeros([CHUNK, VALUES], tl.float32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
        k_TN *= left_to_end(g_BLHN, starts_BL, row, token_T, head, n_N, length, heads, DOCUMENTS, N, PRODUCT, PRECISION)
        kept_TP += product(k_TN, state_block(after_BCHNP, index, n_N, p_P, N, P), PRODUCT, PRECISION)
    if DOCUMENTS:
        kept_TP = tl.where((ends_later(starts_BL, row, token_T, end, length) > 0)[:, None], 0.0, kept_TP)
    dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
    score_TT = scores_of_chunk(scores_BHLT, row, head, token_T, length, heads, CHUNK)
    grad_TP = kept_TP + product(tl.trans(score_TT), dy_TP, PRODUCT, PRECISION)
    at_TP = ((row * length + token_T) * heads + head)[:, None] * P + p_P[None, :]
    tl.store(grad_v_BLHP + at_TP, grad_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(p_P < P, 0))


@triton.jit
def token_gradients(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, v_BLHP: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor,
    dy_BLHP: tl.tensor, before_BCHNP: tl.tensor, after_BCHNP: tl.tensor, through_BCHN: tl.tensor,
    weights_BHLT: tl.tensor, pairs_q_BLHN: tl.tensor, pairs_k_BLHN: tl.tensor, grad_q_BLHN: tl.tensor,
    grad_k_BLHN: tl.tensor, grad_g_BLHN: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dq, dk and dg for a chunk's tokens and KEYS key channels. Grid: (chunks, heads * key slices, rows)."""
    across: tl.constexpr = BLOCK_N // KEYS
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    n_N = tl.program_id(1) % across * KEYS + tl.arange(0, KEYS)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    inside_T = token_T < length
    seen_TN, kept_TN = _through_states(
        g_BLHN, starts_BL, v_BLHP, dy_BLHP, before_BCHNP, after_BCHNP, row, index, head, token_T, n_N, length, heads,
        DOCUMENTS, N, P, CHUNK, BLOCK_P, KEYS, VALUES, PRODUCT, PRECISION,
    )  # fmt: skip
    at_TN = ((row * length + token_T) * heads + head)[:, None] * N + n_N[None, :]
    there_TN = tl.expand_dims(inside_T, 1) & tl.expand_dims(n_N < N, 0)
    q_TN = tl.load(q_BLHN + at_TN, mask=there_TN, other=0.0).to(tl.float32)
    k_TN = tl.load(k_BLHN + at_TN, mask=there_TN, other=0.0).to(tl.float32)
    of_q_TN = tl.load(pairs_q_BLHN + at_TN, mask=there_TN, other=0.0)
    of_k_TN = tl.load(pairs_k_BLHN + at_TN, mask=there_TN, other=0.0)
    through_N = tl.load(through_BCHN + index * N + n_N, mask=n_N < N, other=0.0)
    grad_TN = _decay_gradients(
        starts_BL, q_TN * seen_TN, k_TN * kept_TN, q_TN * of_q_TN - k_TN * of_k_TN, through_N, row, token_T, length,
        DOCUMENTS, PRODUCT, PRECISION,
    )  # fmt: skip
    at_T = ((row * heads + head) * length + token_T) * CHUNK + tl.arange(0, CHUNK)
    own_T1 = tl.load(weights_BHLT + at_T, mask=inside_T, other=0.0)[:, None]
    tl.store(grad_q_BLHN + at_TN, of_q_TN + own_T1 * k_TN + seen_TN, mask=there_TN)
    tl.store(grad_k_BLHN + at_TN, of_k_TN + own_T1 * q_TN + kept_TN, mask=there_TN)
    tl.store(grad_g_BLHN + at_TN, grad_TN, mask=there_TN)


@triton.jit
def _through_states(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, v_BLHP: tl.tensor, dy_BLHP: tl.tensor, before_BCHNP: tl.tensor,
    after_BCHNP: tl.tensor, row: tl.tensor, index: tl.tensor, head: tl.tensor, token_T: tl.tensor, n_N: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return F h dy and L dh v (T, KEYS), summed over all value channels.

    The first result is 0 for tokens outside the chunk's first document, since only this document reads h. The second
    result is 0 for tokens outside the chunk's last document, since only that document contributes to the state after
    the chunk.
    """
    seen_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    kept_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    for start in range(0, BLOCK_P, VALUES):
        p_P = start + tl.arange(0, VALUES)
        dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
        before_NP = state_block(before_BCHNP, index, n_N, p_P, N, P)
        seen_TN += product(dy_TP, tl.trans(before_NP), PRODUCT, PRECISION)
        v_TP = tokens_by_channel(v_BLHP, row, token_T, head, p_P, length, heads, P)
        after_NP = state_block(after_BCHNP, index, n_N, p_P, N, P)
        kept_TN += product(v_TP, tl.trans(after_NP), PRODUCT, PRECISION)
    g_TN = finite_decays(g_BLHN, starts_BL, row, token_T, head, n_N, length, heads, DOCUMENTS, N)
    up_to_TT = token_T[:, None] >= token_T[None, :]
    seen_TN *= tl.exp(sums_by_mask(up_to_TT, g_TN, PRODUCT, PRECISION))
    kept_TN *= tl.exp(sums_by_mask(token_T[:, None] < token_T[None, :], g_TN, PRODUCT, PRECISION))
    if DOCUMENTS:
        document_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        seen_TN = tl.where((document_T > 0)[:, None], 0.0, seen_TN)
        kept_TN = tl.where((document_T < tl.max(document_T, axis=0))[:, None], 0.0, kept_TN)
    return seen_TN, kept_TN


@triton.jit
def _decay_gradients(
    starts_BL: tl.tensor, seen_TN: tl.tensor, kept_TN: tl.tensor, pairs_TN: tl.tensor, through_N: tl.tensor,
    row: tl.tensor, token_T: tl.tensor, length: int, DOCUMENTS: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return dg as the sum of its four terms.

    seen: q F h dy for each token, from reading the state before the chunk
    kept: k L dh v for each token, from the contribution to the state after the chunk
    pairs: q dq - k dk for each token, where dq and dk come from scores between two different tokens
    through: W sum_p h dh, from the state that decays through the chunk
    """
    from_TT = token_T[:, None] <= token_T[None, :]  # (t, i) with i >= t
    before_TT = token_T[:, None] > token_T[None, :]  # (t, j) with j < t
    if DOCUMENTS:
        # `seen` and `kept` may be infinite, and 0 times infinity is NaN. Where that may happen, the right sum is 0, and
        # replaces the NaN: tokens outside the chunk's first document have no `seen`, and no token before the last
        # document has `kept`.
        document_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        grad_TN = sums_by_mask(from_TT, seen_TN, PRODUCT, PRECISION)
        grad_TN = tl.where((document_T > 0)[:, None], 0.0, grad_TN)
        of_kept_TN = sums_by_mask(before_TT, kept_TN, PRODUCT, PRECISION)
        last = tl.max(document_T, axis=0)
        grad_TN += tl.where((document_T < last)[:, None], 0.0, of_kept_TN)
        one_TT = from_TT & (tl.expand_dims(document_T, 1) == tl.expand_dims(document_T, 0))
        grad_TN += sums_by_mask(one_TT, pairs_TN, PRODUCT, PRECISION)
    else:
        grad_TN = sums_by_mask(from_TT, seen_TN + pairs_TN, PRODUCT, PRECISION)
        grad_TN += sums_by_mask(before_TT, kept_TN, PRODUCT, PRECISION)
    grad_TN += through_N[None, :]
    if DOCUMENTS:
        grad_TN = tl.where((begins(starts_BL, row, token_T, length) != 0)[:, None], 0.0, grad_TN)
    return grad_TN
