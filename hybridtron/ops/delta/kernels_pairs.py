"""Triton kernels for the delta rule: scores between tokens in a chunk, and the gradients through these scores.

In these equations, i and j are tokens in one document and one chunk. Token i's query reads the keys of the tokens j <=
i, and its key reads the keys of the tokens j < i. E_ijn is the product of key channel n's decays from token j + 1 to
token i. The scores are

    A_ij = sum_n q_in E_ijn k_jn  for j <= i,      P_ij = sum_n k_in E_ijn k_jn  for j < i

`kernels_backward` has computed the gradients M for A, and Q for P. The terms in dq and dk that come from scores are

    dq_i = sum_j M_ij E_ij k_j,    dk_i = sum_j Q_ij E_ij k_j + sum_j E_ji (M_ji q_j + Q_ji k_j)

In the first sum of dk_i, token i reads other keys; in the second sum, later tokens read its key. Let S_i be the log
decays' sum up to token i, so that E_ij = exp(S_i - S_j). The kernels also store the gradient for S_i, called gain_i. It
is q_i dq_i, plus k_i times the first sum in dk_i, minus k_i times the second sum. The gradient for t's log decay
contains the sum of gain_i over i >= t. A_ii contains no decay, so it is left out of the gain.

With one decay per head, E is a matrix (T, T). The sums S are float64: in fp32, after a few strong decays, rounding
would lose weak decays. If i does not see j, the exponent is -inf. Let R be the matrix with R_ij = A_ij M_ij +
P_ij Q_ij. Then gain_i is the sum over R's row i, minus the sum over R's column i. In the sum of gain_i over i >= t, an
entry of R whose tokens are both at or after t is added once and subtracted once, and cancels.

With a decay per channel, E depends on n and has to stay inside the sum over n. The kernels therefore divide the chunk
into blocks of 2 tokens, then of 4, 8 and so on. For any two tokens there is exactly one block that has them in
different halves. Let m be the first token of this block's second half. Then

    E_ijn = F_in L_jn        F_i: decays' product from m to i,   L_j: decays' product after j and before m

So for each block size, the scores are a matrix multiplication of q F with k L. No exponent is above 0, and no sums of
log decays are subtracted. When the block size doubles, two blocks become the halves of one block. Then F in the
second half is multiplied by the product of the first half's decays, and L in the first half is multiplied by the
product of the second half's decays. Where a document begins, the decay is 0.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels n, T tokens per chunk, K blocks per
chunk, I tokens per half block. Scores are (B, H, L, T).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.gla.kernels_forward import begins, log_decays, scores_of_chunk
from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel


@triton.jit
def _between(
    g_BLH1: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, length: int,
    heads: int, DOCUMENTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the matrix E (T, T) for one decay per head; E_ij is 0 where token i does not see token j."""
    g_T = tl.load(g_BLH1 + (row * length + token_T) * heads + head, mask=token_T < length, other=0.0)
    sum_T = tl.cumsum(g_T.to(tl.float64), axis=0)
    exponent_TT = (sum_T[:, None] - sum_T[None, :]).to(tl.float32)
    sees_TT = token_T[:, None] >= token_T[None, :]
    if DOCUMENTS:
        document_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        sees_TT = sees_TT & (document_T[:, None] == document_T[None, :])
    return tl.exp(tl.where(sees_TT, exponent_TT, float("-inf")))


@triton.jit
def scores_by_head(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLH1: tl.tensor, starts_BL: tl.tensor, A_BHLT: tl.tensor,
    P_BHLT: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store A and P for one chunk and head, for one decay per head. Grid: (chunks, heads, rows)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    of_q_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_k_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
        k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
        of_q_TT += product(q_TN, tl.trans(k_TN), PRODUCT, PRECISION)
        of_k_TT += product(k_TN, tl.trans(k_TN), PRODUCT, PRECISION)
    between_TT = _between(g_BLH1, starts_BL, row, token_T, head, length, heads, DOCUMENTS)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    there_T1 = (token_T < length)[:, None]
    tl.store(A_BHLT + at_TT, of_q_TT * between_TT, mask=there_T1)
    of_k_TT = tl.where(token_T[:, None] > token_T[None, :], of_k_TT * between_TT, 0.0)
    tl.store(P_BHLT + at_TT, of_k_TT, mask=there_T1)


@triton.jit
def scores_by_channel(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, A_BHLT: tl.tensor,
    P_BHLT: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    HALVINGS: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store A and P for one chunk and head, for a decay per key channel. Grid: (chunks, heads, rows)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place_T = tl.arange(0, CHUNK)
    token_T = chunk * CHUNK + place_T
    inside_T = token_T < length
    of_q_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_k_TT = tl.zeros([CHUNK, CHUNK], tl.float32)
    own_T = tl.zeros([CHUNK], tl.float32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
        k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
        own_T += tl.sum(q_TN.to(tl.float32) * k_TN.to(tl.float32), axis=1)
        F_TN = tl.exp(log_decays(g_BLHN, starts_BL, row, token_T, inside_T, head, n_N, length, heads, DOCUMENTS, N))
        L_TN = tl.full([CHUNK, KEYS], 1.0, tl.float32)
        for halving in tl.static_range(HALVINGS):
            pairs_TT = _in_other_half(place_T, 2**halving)
            seen_NT = tl.trans(k_TN * L_TN)
            of_q_TT += tl.where(pairs_TT, product(q_TN * F_TN, seen_NT, PRODUCT, PRECISION), 0.0)
            of_k_TT += tl.where(pairs_TT, product(k_TN * F_TN, seen_NT, PRODUCT, PRECISION), 0.0)
            F_TN, L_TN = _of_larger_halves(F_TN, L_TN, 2**halving, CHUNK, KEYS)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + place_T[None, :]
    of_q_TT = tl.where(place_T[:, None] == place_T[None, :], own_T[:, None], of_q_TT)
    tl.store(A_BHLT + at_TT, of_q_TT, mask=inside_T[:, None])
    tl.store(P_BHLT + at_TT, of_k_TT, mask=inside_T[:, None])


@triton.jit
def _in_other_half(place_T: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return a mask (T, T): True if j is in the first half of a block, and i is in the second half of this block.

    A half has SIZE tokens.
    """
    half_T = place_T // SIZE
    return (half_T[:, None] == half_T[None, :] + 1) & (half_T[None, :] % 2 == 0)


@triton.jit
def _of_larger_halves(
    F_TN: tl.tensor, L_TN: tl.tensor, SIZE: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return F and L for halves with 2 * SIZE tokens, given F and L for halves with SIZE tokens."""
    second_121 = (tl.arange(0, 2) == 1)[None, :, None]
    last_11I1 = (tl.arange(0, SIZE) == SIZE - 1)[None, None, :, None]
    F_K2IN = tl.reshape(F_TN, [CHUNK // (2 * SIZE), 2, SIZE, KEYS])
    L_K2IN = tl.reshape(L_TN, [CHUNK // (2 * SIZE), 2, SIZE, KEYS])
    whole_K2N = tl.sum(tl.where(last_11I1, F_K2IN, 0.0), axis=2)
    first_K1N = tl.expand_dims(tl.sum(tl.where(second_121, 0.0, whole_K2N), axis=1), 1)
    second_K1N = tl.expand_dims(tl.sum(tl.where(second_121, whole_K2N, 0.0), axis=1), 1)
    F_K2IN *= tl.expand_dims(tl.where(second_121, first_K1N, 1.0), 2)
    L_K2IN *= tl.expand_dims(tl.where(second_121, 1.0, second_K1N), 2)
    return tl.reshape(F_K2IN, [CHUNK, KEYS]), tl.reshape(L_K2IN, [CHUNK, KEYS])


@triton.jit
def pairs_by_head(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLH1: tl.tensor, starts_BL: tl.tensor, A_BHLT: tl.tensor,
    P_BHLT: tl.tensor, M_BHLT: tl.tensor, Q_BHLT: tl.tensor, grad_q_BLHN: tl.tensor, grad_k_BLHN: tl.tensor,
    gain_BLH1: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store the terms in dq and dk that come from scores, and the gain, for one chunk and KEYS key channels.

    This kernel is for one decay per head; `pairs_by_channel` is for a decay per key channel.

    Grid: (chunks, heads * key slices, rows).
    """
    across: tl.constexpr = BLOCK_N // KEYS
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    n_N = tl.program_id(1) % across * KEYS + tl.arange(0, KEYS)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_T = token_T < length
    place_T = tl.arange(0, CHUNK)
    M_TT = scores_of_chunk(M_BHLT, row, head, token_T, length, heads, CHUNK).to(tl.float32)
    Q_TT = scores_of_chunk(Q_BHLT, row, head, token_T, length, heads, CHUNK).to(tl.float32)
    worth_TT = M_TT * scores_of_chunk(A_BHLT, row, head, token_T, length, heads, CHUNK).to(tl.float32)
    worth_TT += Q_TT * scores_of_chunk(P_BHLT, row, head, token_T, length, heads, CHUNK)
    worth_TT = tl.where(place_T[:, None] > place_T[None, :], worth_TT, 0.0)
    gain_T = tl.sum(worth_TT - tl.trans(worth_TT), axis=1)
    at_T = (row * length + token_T) * heads + head
    tl.store(gain_BLH1 + at_T, gain_T, mask=inside_T & (tl.program_id(1) % across == 0))
    between_TT = _between(g_BLH1, starts_BL, row, token_T, head, length, heads, DOCUMENTS)
    M_TT *= between_TT
    Q_TT *= between_TT
    q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
    k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
    of_q_TN = product(M_TT, k_TN, PRODUCT, PRECISION)
    of_k_TN = product(Q_TT, k_TN, PRODUCT, PRECISION) + product(tl.trans(M_TT), q_TN, PRODUCT, PRECISION)
    of_k_TN += product(tl.trans(Q_TT), k_TN, PRODUCT, PRECISION)
    at_TN = ((row * length + token_T) * heads + head)[:, None] * N + n_N[None, :]
    there_TN = tl.expand_dims(inside_T, 1) & tl.expand_dims(n_N < N, 0)
    tl.store(grad_q_BLHN + at_TN, of_q_TN, mask=there_TN)
    tl.store(grad_k_BLHN + at_TN, of_k_TN, mask=there_TN)


@triton.jit
def pairs_by_channel(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, M_BHLT: tl.tensor,
    Q_BHLT: tl.tensor, grad_q_BLHN: tl.tensor, grad_k_BLHN: tl.tensor, gain_BLHN: tl.tensor, length: int, heads: int,
    DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, HALVINGS: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store the terms in dq and dk that come from scores, and the gain, for one chunk and KEYS key channels.

    This kernel is for a decay per key channel; `pairs_by_head` is for one decay per head.

    Grid: (chunks, heads * key slices, rows).
    """
    across: tl.constexpr = BLOCK_N // KEYS
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    n_N = tl.program_id(1) % across * KEYS + tl.arange(0, KEYS)
    place_T = tl.arange(0, CHUNK)
    token_T = chunk * CHUNK + place_T
    inside_T = token_T < length
    q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
    k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + place_T[None, :]
    F_TN = tl.exp(log_decays(g_BLHN, starts_BL, row, token_T, inside_T, head, n_N, length, heads, DOCUMENTS, N))
    L_TN = tl.full([CHUNK, KEYS], 1.0, tl.float32)
    of_q_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    of_reader_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    of_read_TN = tl.zeros([CHUNK, KEYS], tl.float32)
    for halving in tl.static_range(HALVINGS):
        pairs_TT = _in_other_half(place_T, 2**halving) & tl.expand_dims(inside_T, 1)
        of_A_TT = tl.load(M_BHLT + at_TT, mask=pairs_TT, other=0.0)
        of_P_TT = tl.load(Q_BHLT + at_TT, mask=pairs_TT, other=0.0)
        of_q_TN += F_TN * product(of_A_TT, k_TN * L_TN, PRODUCT, PRECISION)
        of_reader_TN += F_TN * product(of_P_TT, k_TN * L_TN, PRODUCT, PRECISION)
        read_TN = product(tl.trans(of_A_TT), q_TN * F_TN, PRODUCT, PRECISION)
        of_read_TN += L_TN * (read_TN + product(tl.trans(of_P_TT), k_TN * F_TN, PRODUCT, PRECISION))
        F_TN, L_TN = _of_larger_halves(F_TN, L_TN, 2**halving, CHUNK, KEYS)
    own_T = ((row * heads + head) * length + token_T) * CHUNK + place_T
    own_T1 = tl.load(M_BHLT + own_T, mask=inside_T, other=0.0).to(tl.float32)[:, None]
    at_TN = ((row * length + token_T) * heads + head)[:, None] * N + n_N[None, :]
    there_TN = tl.expand_dims(inside_T, 1) & tl.expand_dims(n_N < N, 0)
    tl.store(grad_q_BLHN + at_TN, of_q_TN + own_T1 * k_TN, mask=there_TN)
    tl.store(grad_k_BLHN + at_TN, of_reader_TN + of_read_TN + own_T1 * q_TN, mask=there_TN)
    tl.store(gain_BLHN + at_TN, q_TN * of_q_TN + k_TN * (of_reader_TN - of_read_TN), mask=there_TN)
