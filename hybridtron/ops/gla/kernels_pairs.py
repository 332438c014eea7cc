"""Triton kernels for gated linear attention: scores between tokens in a chunk, and the gradients through these scores.

i and j are tokens in one chunk and one document. E_ijn is the product of key channel n's decays over the tokens after
j, up to i. A are the scores, and M are the gradients for A, which `pair_weights` in `kernels_backward` has computed:

    scores    A_ij = sum_n q_in E_ijn k_jn  for j <= i
    pairs     the terms in dq_i: sum_j M_ij E_ij k_j  over j < i
              the terms in dk_j: sum_i M_ij E_ij q_i  over i > j

E depends on n, so it has to stay inside the sums. The kernels divide tokens into blocks of 2, then of 4, 8 and so on.
For any two tokens there is exactly one block that has them in different halves. Let m be the first token of this
block's second half. Then

    E_ijn = X_in X_jn       X_i: decays' product from m to i,   X_j: decays' product after j and before m

So for each block size, the scores are a matrix multiplication of q X with k X. X is the exponential of a sum of log
decays. Log decays are at most 0, and no sum is subtracted from another, so no factor is above 1. The sums are matrix
multiplications too, of a mask with the log decays (`sums_by_mask` in `kernels_forward`).

Blocks of at most `ChunkTiles.part` tokens need only tiles of this size. Outside fp32, one warp is enough for a tile: it
exchanges almost nothing through shared memory, and waits for no other warp. A second launch computes the larger blocks,
in tiles with all tokens in a chunk.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels n, T tokens per tile. Scores are
(B, H, L, tokens per chunk).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.gla.kernels_forward import finite_decays, sums_by_mask
from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel


@triton.jit
def _halves(place_T: tl.tensor, SIZE: tl.constexpr) -> tuple:
    """Return two masks (T, T) for blocks with halves of SIZE tokens.

    pairs: True at (i, j) if i is in a block's second half, and j is in the first half of the same block
    decays: True at (t, u) if X_t contains the decay of token u
    """
    half_T = place_T // SIZE
    second_T1 = half_T[:, None] % 2 == 1
    pairs_TT = (half_T[:, None] == half_T[None, :] + 1) & second_T1
    up_to_TT = place_T[None, :] <= place_T[:, None]
    return pairs_TT, (half_T[:, None] == half_T[None, :]) & (second_T1 == up_to_TT)


@triton.jit
def scores(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, scores_BHLT: tl.tensor, length: int,
    heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
    END: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store A for pairs of tokens in blocks whose halves have 2**FIRST to 2**(END - 1) tokens.

    With FIRST = 0, A_ii is stored too. Pairs in which i is before j get zeros. Grid: (tiles, heads, rows).
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place_T = tl.arange(0, TILE)
    token_T = tl.program_id(0) * TILE + place_T
    stored_TT = tl.broadcast_to(tl.expand_dims(token_T < length, 1), [TILE, TILE])
    score_TT = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
        k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
        g_TN = finite_decays(g_BLHN, starts_BL, row, token_T, head, n_N, length, heads, DOCUMENTS, N)
        if FIRST == 0:
            own_TT = product(q_TN, tl.trans(k_TN), PRODUCT, PRECISION)
            score_TT += tl.where(place_T[:, None] == place_T[None, :], own_TT, 0.0)
        for halving in tl.static_range(FIRST, END):
            pairs_TT, decays_TT = _halves(place_T, 2**halving)
            X_TN = tl.exp(sums_by_mask(decays_TT, g_TN, PRODUCT, PRECISION))
            found_TT = product(q_TN * X_TN, tl.trans(k_TN * X_TN), PRODUCT, PRECISION)
            score_TT += tl.where(pairs_TT, found_TT, 0.0)
    if FIRST > 0:
        stored_TT = stored_TT & (place_T[:, None] // 2**FIRST != place_T[None, :] // 2**FIRST)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK
    at_TT += (tl.program_id(0) * TILE % CHUNK + place_T)[None, :]
    tl.store(scores_BHLT + at_TT, score_TT, mask=stored_TT)


@triton.jit
def pairs(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, weights_BHLT: tl.tensor,
    grad_q_BLHN: tl.tensor, grad_k_BLHN: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store the terms in dq and dk for the same pairs as `scores`, without the pairs with i = j.

    With FIRST > 0, the terms are added to those that the first launch has stored. A program computes KEYS key channels.
    Grid: (tiles, heads * key slices, rows).
    """
    across: tl.constexpr = BLOCK_N // KEYS
    head, row = tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    n_N = tl.program_id(1) % across * KEYS + tl.arange(0, KEYS)
    place_T = tl.arange(0, TILE)
    token_T = tl.program_id(0) * TILE + place_T
    q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N)
    k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N)
    g_TN = finite_decays(g_BLHN, starts_BL, row, token_T, head, n_N, length, heads, DOCUMENTS, N)
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK
    at_TT += (tl.program_id(0) * TILE % CHUNK + place_T)[None, :]
    weight_TT = tl.load(weights_BHLT + at_TT, mask=tl.expand_dims(token_T < length, 1), other=0.0)
    grad_q_TN = tl.zeros([TILE, KEYS], tl.float32)
    grad_k_TN = tl.zeros([TILE, KEYS], tl.float32)
    for halving in tl.static_range(FIRST, END):
        pairs_TT, decays_TT = _halves(place_T, 2**halving)
        X_TN = tl.exp(sums_by_mask(decays_TT, g_TN, PRODUCT, PRECISION))
        of_pairs_TT = tl.where(pairs_TT, weight_TT, 0.0)
        grad_q_TN += X_TN * product(of_pairs_TT, k_TN * X_TN, PRODUCT, PRECISION)
        grad_k_TN += X_TN * product(tl.trans(of_pairs_TT), q_TN * X_TN, PRODUCT, PRECISION)
    at_TN = ((row * length + token_T) * heads + head)[:, None] * N + n_N[None, :]
    there_TN = tl.expand_dims(token_T < length, 1) & tl.expand_dims(n_N < N, 0)
    if FIRST > 0:
        grad_q_TN += tl.load(grad_q_BLHN + at_TN, mask=there_TN, other=0.0)
        grad_k_TN += tl.load(grad_k_BLHN + at_TN, mask=there_TN, other=0.0)
    tl.store(grad_q_BLHN + at_TN, grad_q_TN, mask=there_TN)
    tl.store(grad_k_BLHN + at_TN, grad_k_TN, mask=there_TN)
