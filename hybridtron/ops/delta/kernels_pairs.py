"""Triton kernels of the delta rule: pairs of tokens inside a chunk, as scores and as gradients.

Queries and keys read the keys of their own document's tokens, with E_ijn the product of the decays after j up to i:

    A_ij = sum over n of q_in E_ijn k_jn  for j <= i,      P_ij = sum over n of k_in E_ijn k_jn  for j < i

and with M_ij = dy_i . u_j for j <= i and Q_ij = -x_i . u_j for j < i, the gradients of A and P (`kernels_backward`),

    dq_i = sum_j M_ij E_ij k_j,    dk_j = sum_i E_ij (M_ij q_i + Q_ij k_i) + sum_i E_ji Q_ji k_i

The log decays up to i gain by what i reads and lose by what reads i: "gain" is the first less the second, whose sum
over i >= t is the gradient of t's log decay through pairs (`kernels_backward.token_gradients`). A token's pair with
itself has no decay and is in neither.

With one decay for a head E_ij is a matrix. Its exponents are differences of sums in float64, in which a few strong
decays do not blur the weak ones; what is not seen is masked in the exponent. Gains are then the sums of A M + P Q over
rows less those over columns, the same numbers twice, so that what cancels leaves nothing behind.

With a decay for each channel E stands inside the sum over n. So a chunk is halved again and again: two tokens are in
different halves of one block, of 2, 4, 8... tokens, and just one. With m the first token of the second half,

    E_ijn = F_in L_jn        F_i: the product of the decays from m to i,   L_j: that of those after j and before m

so all pairs of one block size are a matrix product of q F and k L, no exponent is above 0, and no difference of sums is
taken. F and L of the next size are those of this one, times the whole of the other half: F in later halves, L in
earlier ones. Where a document begins the decay is 0.

Legend: as in `reference`; T tokens of a chunk; K blocks of it, I tokens of a half. Scores are (B, H, L, T).
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
    """E of a head whose channels decay alike (T, T), 0 where nothing is seen."""
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
    """A and P of a chunk."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    of_q_TT, of_k_TT = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
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
    """A and P of a chunk."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place_T = tl.arange(0, CHUNK)
    token_T = chunk * CHUNK + place_T
    inside_T = token_T < length
    of_q_TT, of_k_TT = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
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
    """Whether i is in the second half of a block and j in the first, halves being this large (T, T)."""
    half_T = place_T // SIZE
    return (half_T[:, None] == half_T[None, :] + 1) & (half_T[None, :] % 2 == 0)


@triton.jit
def _of_larger_halves(
    F_TN: tl.tensor, L_TN: tl.tensor, SIZE: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
) -> tuple:  # fmt: skip
    """F and L of halves twice as large."""
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
    """What queries and keys of a chunk get through pairs, some channels of them, and the gain."""
    across: tl.constexpr = BLOCK_N // KEYS
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    n_N = tl.program_id(1) % across * KEYS + tl.arange(0, KEYS)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_T, place_T = token_T < length, tl.arange(0, CHUNK)
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
    """What queries and keys of a chunk get through pairs, some channels of them, and the gain."""
    across: tl.constexpr = BLOCK_N // KEYS
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    n_N, place_T = tl.program_id(1) % across * KEYS + tl.arange(0, KEYS), tl.arange(0, CHUNK)
    token_T = chunk * CHUNK + place_T
    inside_T = token_T < length
    q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
    k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + place_T[None, :]
    F_TN = tl.exp(log_decays(g_BLHN, starts_BL, row, token_T, inside_T, head, n_N, length, heads, DOCUMENTS, N))
    L_TN = tl.full([CHUNK, KEYS], 1.0, tl.float32)
    of_q_TN, of_reader_TN = tl.zeros([CHUNK, KEYS], tl.float32), tl.zeros([CHUNK, KEYS], tl.float32)
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
