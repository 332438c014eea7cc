"""Triton kernels for the delta rule, backward: gradients for states, corrections, scores, tokens and decays.

The forward pass (`kernels_forward`) defines, for a chunk with the state h before it:

    F_i, L_j, W    products of the chunk's decays: up to token i, after token j, and over all tokens
    A_ij, P_ij     scores of token i's query (A) and of token i's key (P) with token j's key
    Z              (I + diag(beta) P)^-1
    w, u           corrections w_i (value minus the value that the state stores for the key), and u = beta w

Let dh be the state gradient after the chunk, and let dh' be the state gradient before it. The kernels compute

    walk_back          du = Z^T (A^T dy + (k L) dh),   x = beta du,
                       dh' = W dh + (q F)^T dy - (k F)^T x        in a loop from the last chunk to the first
    pair_weights       M_ij = dy_i . u_j for j <= i,   Q_ij = -x_i . u_j for j < i,   dv = x,   dbeta = w . du
    token_gradients    dq += F (h dy),   dk += L (dh u) - F (h x)
                       dg_t = sum_{i >= t} gain_i + sum_{j < t} k_j L_j dh u_j + W sum_p h dh

M and Q are the gradients for A and P. `kernels_pairs` has computed the terms of dq and dk that come from scores, and
`+=` adds to them. gain_i is the gradient for the log decays' sum up to token i. It has two terms. `kernels_pairs` has
also computed the term from scores; in dg_t, this term is summed over the tokens i >= t of t's document. The term from h
is q_i F_i (h dy_i) - k_i F_i (h x_i). `delta/chunked.py` derives the equations.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, G = N or 1 (a
decay per key channel or per head), T tokens per chunk, C chunks, S slices along the key channels, p a value channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.delta.kernels_forward import beta_of_chunk, kept
from hybridtron.ops.gla.kernels_forward import begins, scores_of_chunk, since_start, state_block, summed, to_end
from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel


@triton.jit
def walk_back(
    dy_BLHP: tl.tensor, beta_BLH: tl.tensor, A_BHLT: tl.tensor, Z_BHLT: tl.tensor, q_enter_BLHN: tl.tensor,
    k_enter_BLHN: tl.tensor, k_leave_BLHN: tl.tensor, whole_BCHG: tl.tensor, grad_end_BHNP: tl.tensor,
    grad_start_BHNP: tl.tensor, after_BCHNP: tl.tensor, du_BLHP: tl.tensor, length: int, heads: int, chunks: int,
    BY_HEAD: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store du, the state gradients dh after each chunk, and the state gradient before the row.

    A program computes VALUES value channels of one head, with all key channels. Grid: (value slices, heads, rows). The
    state gradient (BLOCK_N, VALUES) stays in registers over the loop.
    """
    n_N = tl.arange(0, BLOCK_N)
    p_P = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at_NP = n_N[:, None] * P + p_P[None, :]
    there_NP = tl.expand_dims(n_N < N, 1) & tl.expand_dims(p_P < P, 0)
    border = (row * heads + head) * N * P
    grad_NP = tl.load(grad_end_BHNP + border + at_NP, mask=there_NP, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step
        token_T = chunk * CHUNK + tl.arange(0, CHUNK)
        index = (row * chunks + chunk) * heads + head
        tl.store(after_BCHNP + index * N * P + at_NP, grad_NP, mask=there_NP)
        dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
        score_TT = tl.trans(scores_of_chunk(A_BHLT, row, head, token_T, length, heads, CHUNK))
        k_TN = tokens_by_channel(k_leave_BLHN, row, token_T, head, n_N, length, heads, N)
        du_TP = product(score_TT, dy_TP, PRODUCT, PRECISION) + product(k_TN, grad_NP, PRODUCT, PRECISION)
        Z_TT = tl.trans(scores_of_chunk(Z_BHLT, row, head, token_T, length, heads, CHUNK))
        du_TP = product(Z_TT, du_TP, PRODUCT, PRECISION)
        at_TP = ((row * length + token_T) * heads + head)[:, None] * P + p_P[None, :]
        tl.store(du_BLHP + at_TP, du_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(p_P < P, 0))
        x_TP = beta_of_chunk(beta_BLH, row, head, token_T, length, heads)[:, None] * du_TP
        q_NT = tl.trans(tokens_by_channel(q_enter_BLHN, row, token_T, head, n_N, length, heads, N))
        k_NT = tl.trans(tokens_by_channel(k_enter_BLHN, row, token_T, head, n_N, length, heads, N))
        grad_NP = kept(whole_BCHG, index, grad_NP, n_N, BY_HEAD, N)
        grad_NP += product(q_NT, dy_TP, PRODUCT, PRECISION) - product(k_NT, x_TP, PRODUCT, PRECISION)
    tl.store(grad_start_BHNP + border + at_NP, grad_NP, mask=there_NP)


@triton.jit
def pair_weights(
    dy_BLHP: tl.tensor, beta_BLH: tl.tensor, w_BLHP: tl.tensor, du_BLHP: tl.tensor, M_BHLT: tl.tensor,
    Q_BHLT: tl.tensor, grad_v_BLHP: tl.tensor, grad_beta_BLH: tl.tensor, length: int, heads: int, P: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store M, Q, and the gradients for v and beta, for one chunk and head. Grid: (chunks, heads, rows)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place_T = tl.arange(0, CHUNK)
    token_T = chunk * CHUNK + place_T
    inside_T = token_T < length
    beta_T1 = beta_of_chunk(beta_BLH, row, head, token_T, length, heads)[:, None]
    M_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    Q_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    grad_beta_T = tl.zeros([CHUNK], tl.float32)
    for start in range(0, BLOCK_P, VALUES):
        p_P = start + tl.arange(0, VALUES)
        w_TP = tokens_by_channel(w_BLHP, row, token_T, head, p_P, length, heads, P).to(tl.float32)
        du_TP = tokens_by_channel(du_BLHP, row, token_T, head, p_P, length, heads, P).to(tl.float32)
        dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
        grad_beta_T += tl.sum(w_TP * du_TP, axis=1)
        x_TP = beta_T1 * du_TP
        u_PT = tl.trans(beta_T1 * w_TP)
        M_TT += product(dy_TP, u_PT, PRODUCT, PRECISION)
        Q_TT -= product(x_TP, u_PT, PRODUCT, PRECISION)
        at_TP = ((row * length + token_T) * heads + head)[:, None] * P + p_P[None, :]
        tl.store(grad_v_BLHP + at_TP, x_TP, mask=tl.expand_dims(inside_T, 1) & tl.expand_dims(p_P < P, 0))
    tl.store(grad_beta_BLH + (row * length + token_T) * heads + head, grad_beta_T, mask=inside_T)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + place_T[None, :]
    M_TT = tl.where(place_T[:, None] >= place_T[None, :], M_TT, 0.0)
    Q_TT = tl.where(place_T[:, None] > place_T[None, :], Q_TT, 0.0)
    tl.store(M_BHLT + at_TT, M_TT, mask=inside_T[:, None])
    tl.store(Q_BHLT + at_TT, Q_TT, mask=inside_T[:, None])


@triton.jit
def token_gradients(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, beta_BLH: tl.tensor, g_BLHG: tl.tensor, starts_BL: tl.tensor,
    dy_BLHP: tl.tensor, w_BLHP: tl.tensor, du_BLHP: tl.tensor, before_BCHNP: tl.tensor, after_BCHNP: tl.tensor,
    pairs_q_BLHN: tl.tensor, pairs_k_BLHN: tl.tensor, gain_BLHG: tl.tensor, grad_q_BLHN: tl.tensor,
    grad_k_BLHN: tl.tensor, grad_g_SBLHG: tl.tensor, length: int, heads: int, BY_HEAD: tl.constexpr,
    DOCUMENTS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dq, dk and dg for a chunk's tokens and KEYS key channels.

    Grid: (chunks, heads * key slices, rows). With one decay per head, each program stores dg summed over its own key
    channels, and torch adds up the slices. All three gradients are computed in one long function, because they share
    the matrix multiplications with the states, and registers spilled when the function was divided.
    """
    across: tl.constexpr = BLOCK_N // KEYS
    G: tl.constexpr = 1 if BY_HEAD else N  # pyrefly: ignore[bad-assignment]
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    part = tl.program_id(1) % across
    n_N = part * KEYS + tl.arange(0, KEYS)
    n_G = tl.arange(0, 1) if BY_HEAD else n_N
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    end = tl.minimum((chunk + 1) * CHUNK, length)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    inside_T = token_T < length
    of_q_TN, of_k_TN, left_TN, through_N = _through_states(
        beta_BLH, dy_BLHP, w_BLHP, du_BLHP, before_BCHNP, after_BCHNP, row, head, index, token_T, n_N, length, heads,
        N, P, CHUNK, BLOCK_P, KEYS, VALUES, PRODUCT, PRECISION,
    )  # fmt: skip
    since_TG = since_start(g_BLHG, starts_BL, row, token_T, inside_T, head, n_G, length, heads, DOCUMENTS, G)
    left_TN *= to_end(g_BLHG, starts_BL, row, token_T, end, head, n_G, length, heads, DOCUMENTS, G)
    of_q_TN *= since_TG
    of_k_TN *= since_TG
    if DOCUMENTS:  # masked here, since a state may be infinite, and 0 times infinity is NaN
        begins_T = begins(starts_BL, row, token_T, length)
        first_T1 = (tl.cumsum(begins_T, axis=0) == 0)[:, None]
        of_q_TN = tl.where(first_T1, of_q_TN, 0.0)
        of_k_TN = tl.where(first_T1, of_k_TN, 0.0)
        through_N = tl.where(tl.sum(begins_T, axis=0) == 0, through_N, 0.0)
    q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
    k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
    at_TN = ((row * length + token_T) * heads + head)[:, None] * N + n_N[None, :]
    there_TN = tl.expand_dims(inside_T, 1) & tl.expand_dims(n_N < N, 0)
    pairs_q_TN = tl.load(pairs_q_BLHN + at_TN, mask=there_TN, other=0.0)
    pairs_k_TN = tl.load(pairs_k_BLHN + at_TN, mask=there_TN, other=0.0)
    tl.store(grad_q_BLHN + at_TN, pairs_q_TN + of_q_TN, mask=there_TN)
    tl.store(grad_k_BLHN + at_TN, pairs_k_TN + of_k_TN + left_TN, mask=there_TN)
    at_TG = ((row * length + token_T) * heads + head)[:, None] * G + n_G[None, :]
    there_TG = tl.expand_dims(inside_T, 1) & tl.expand_dims(n_G < G, 0)
    first = part == 0 if BY_HEAD else True
    of_pairs_TG = tl.load(gain_BLHG + at_TG, mask=there_TG & first, other=0.0)
    whole_1G = tl.expand_dims(tl.min(since_TG, axis=0), 0)
    grad_TG = _decay_gradients(
        q_TN * of_q_TN + k_TN * of_k_TN, k_TN * left_TN, whole_1G * through_N[None, :], of_pairs_TG, starts_BL, row,
        token_T, length, BY_HEAD, DOCUMENTS,
    )  # fmt: skip
    apart = tl.num_programs(2).to(tl.int64) * length * heads if BY_HEAD else 0  # elements per slice of grad_g
    tl.store(grad_g_SBLHG + part * apart + at_TG, grad_TG, mask=there_TG)


@triton.jit
def _through_states(
    beta_BLH: tl.tensor, dy_BLHP: tl.tensor, w_BLHP: tl.tensor, du_BLHP: tl.tensor, before_BCHNP: tl.tensor,
    after_BCHNP: tl.tensor, row: tl.tensor, head: tl.tensor, index: tl.tensor, token_T: tl.tensor, n_N: tl.tensor,
    length: int, heads: int, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return h dy, -h x and dh u (T, KEYS) for a chunk's tokens, and sum_p h dh (KEYS)."""
    of_q_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    of_k_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    left_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    through_N = tl.zeros([KEYS], tl.float32)
    beta_T1 = beta_of_chunk(beta_BLH, row, head, token_T, length, heads)[:, None]
    for start in range(0, BLOCK_P, VALUES):
        p_P = start + tl.arange(0, VALUES)
        before_NP = state_block(before_BCHNP, index, n_N, p_P, N, P)
        after_NP = state_block(after_BCHNP, index, n_N, p_P, N, P)
        through_N += tl.sum(before_NP * after_NP, axis=1)
        before_PN = tl.trans(before_NP)
        dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
        of_q_TN += product(dy_TP, before_PN, PRODUCT, PRECISION)
        x_TP = beta_T1 * tokens_by_channel(du_BLHP, row, token_T, head, p_P, length, heads, P).to(tl.float32)
        of_k_TN -= product(x_TP, before_PN, PRODUCT, PRECISION)
        u_TP = beta_T1 * tokens_by_channel(w_BLHP, row, token_T, head, p_P, length, heads, P).to(tl.float32)
        left_TN += product(u_TP, tl.trans(after_NP), PRODUCT, PRECISION)
    return of_q_TN, of_k_TN, left_TN, through_N


@triton.jit
def _decay_gradients(
    gain_TN: tl.tensor, loss_TN: tl.tensor, through_1N: tl.tensor, of_pairs_TG: tl.tensor, starts_BL: tl.tensor,
    row: tl.tensor, token_T: tl.tensor, length: int, BY_HEAD: tl.constexpr, DOCUMENTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return dg as the sum of its four terms.

    gain: q F (h dy) - k F (h x) for each token, from reading the state before the chunk
    loss: k L (dh u) for each token, from the contribution to the state after the chunk
    through: W sum_p h dh, from the state that decays through the chunk
    of_pairs: the gain from scores for each token

    The first three terms are already 0 for documents that do not read or write the state, so they need no mask.
    `of_pairs` is summed within documents.
    """
    if BY_HEAD:
        gain_TN = tl.sum(gain_TN, axis=1, keep_dims=True)
        loss_TN = tl.sum(loss_TN, axis=1, keep_dims=True)
        through_1N = tl.sum(through_1N, axis=1, keep_dims=True)
    grad_TG = summed(gain_TN, True) + summed(loss_TN, False) - loss_TN + through_1N
    sums_TT = token_T[:, None] <= token_T[None, :]  # (t, i) with i >= t
    if DOCUMENTS:
        document_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        sums_TT = sums_TT & (document_T[:, None] == document_T[None, :])
    if BY_HEAD:
        grad_TG += tl.sum(tl.where(sums_TT, tl.trans(of_pairs_TG), 0.0), axis=1, keep_dims=True)
    else:
        grad_TG += tl.dot(tl.where(sums_TT, 1.0, 0.0), of_pairs_TG, input_precision="tf32x3")
    if DOCUMENTS:
        grad_TG = tl.where((begins(starts_BL, row, token_T, length) == 0)[:, None], grad_TG, 0.0)
    return grad_TG
