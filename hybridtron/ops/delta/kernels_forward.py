"""Triton kernels for the delta rule, forward: decayed queries and keys, triangular inverses, states, and outputs.

h is the state before a chunk of tokens. F_i, L_j and W are products of the chunk's decays: over the tokens up to i,
over the tokens after j, and over all tokens. They multiply vectors over key channels elementwise. `kernels_pairs` has
computed the scores A (queries with keys) and P (keys with keys). The kernels here compute

    factors    q F, k F and k L, stored in the dtype of matrix multiplications; and W
    inverse    X = (I + P diag(beta))^-1
    walk       w = X (v - h^T (k F)),   u = beta w,   next state = W h + (k L)^T u      in a loop over the chunks
    outputs    y_i = sum_{j <= i} A_ij u_j + h^T (q F)_i

`delta/chunked.py` derives the equations. For the backward pass, `inverse` also computes Z = (I + diag(beta) P)^-1.

`inverse` inverts a lower triangular matrix. First it inverts all diagonal blocks (PART tokens each) by forward
substitution. Then it repeatedly merges two neighboring diagonal blocks a and b, with the block c below a and left of b,
into a block twice as large:

    [a 0; c b]^-1 = [a^-1 0; -b^-1 c a^-1 b^-1]

The inverse is computed in fp32. Three tf32 matrix multiplications replace each fp32 matrix multiplication ("tf32x3").

Where a document begins, the log decay is set to minus infinity. So F, L and W are 0 if they include this decay, and A,
P and X are 0 between tokens of different documents. Because 0 times infinity is NaN, a state with infinite or NaN
entries must not be multiplied by these zeros. In the affected value channels the state is replaced by 0. Afterwards,
the outputs and later states of the document that wrote the state are set to NaN in these channels. No kernel uses
atomics, so results are deterministic.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, G = N or 1 (a
decay per key channel or per head), T tokens per chunk, C chunks. Scores are (B, H, L, T), and states are
(B, C, H, N, P).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.gla.kernels_forward import begins, scores_of_chunk, since_start, state_block, to_end
from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel


@triton.jit
def factors(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLHG: tl.tensor, starts_BL: tl.tensor, q_enter_BLHN: tl.tensor,
    k_enter_BLHN: tl.tensor, k_leave_BLHN: tl.tensor, whole_BCHG: tl.tensor, length: int, heads: int,
    BY_HEAD: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Store q F, k F, k L and W for one chunk and KEYS key channels. Grid: (chunks, heads * key slices, rows)."""
    across: tl.constexpr = BLOCK_N // KEYS
    G: tl.constexpr = 1 if BY_HEAD else N  # pyrefly: ignore[bad-assignment]
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    part = tl.program_id(1) % across
    n_N = part * KEYS + tl.arange(0, KEYS)
    n_G = tl.arange(0, 1) if BY_HEAD else n_N
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    end = tl.minimum((chunk + 1) * CHUNK, length)
    inside_T = token_T < length
    since_TG = since_start(g_BLHG, starts_BL, row, token_T, inside_T, head, n_G, length, heads, DOCUMENTS, G)
    left_TG = to_end(g_BLHG, starts_BL, row, token_T, end, head, n_G, length, heads, DOCUMENTS, G)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    there_G = (n_G < G) & (part == 0) if BY_HEAD else n_G < G
    tl.store(whole_BCHG + index * G + n_G, tl.min(since_TG, axis=0), mask=there_G)
    q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
    k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
    at_TN = ((row * length + token_T) * heads + head)[:, None] * N + n_N[None, :]
    there_TN = tl.expand_dims(inside_T, 1) & tl.expand_dims(n_N < N, 0)
    tl.store(q_enter_BLHN + at_TN, q_TN * since_TG, mask=there_TN)
    tl.store(k_enter_BLHN + at_TN, k_TN * since_TG, mask=there_TN)
    tl.store(k_leave_BLHN + at_TN, k_TN * left_TG, mask=there_TN)


@triton.jit
def inverse(
    P_BHLT: tl.tensor, beta_BLH: tl.tensor, X_BHLT: tl.tensor, length: int, heads: int, OF_ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, MERGES: tl.constexpr,
) -> None:  # fmt: skip
    """Store Z if OF_ROWS is True, else X, for one chunk and head. Grid: (chunks, heads, rows).

    Axes: K diagonal blocks, I rows per block, J columns per block.
    """
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_K11 = (tl.arange(0, CHUNK // PART) * PART)[:, None, None]
    i_1I1 = tl.arange(0, PART)[None, :, None]
    X_KIJ = tl.where(i_1I1 == tl.arange(0, PART)[None, None, :], 1.0, 0.0)
    X_KIJ += tl.zeros([CHUNK // PART, PART, PART], tl.float32)
    for j in range(PART - 1):  # forward substitution: subtract multiples of row j from the rows below it
        column_KI1 = _triangle(
            P_BHLT, beta_BLH, row, head, chunk, first_K11 + i_1I1, first_K11 + j, length, heads, OF_ROWS, CHUNK
        )
        X_KIJ -= column_KI1 * tl.expand_dims(tl.sum(tl.where(i_1I1 == j, X_KIJ, 0.0), axis=1), 1)
    for merge in tl.static_range(MERGES):
        pair_K11 = (tl.arange(0, CHUNK // (PART * 2 ** (merge + 1))) * (PART * 2 ** (merge + 1)))[:, None, None]
        within = tl.arange(0, PART * 2**merge)
        below_KI1 = pair_K11 + PART * 2**merge + within[None, :, None]
        before_K1J = pair_K11 + within[None, None, :]
        c_KIJ = _triangle(P_BHLT, beta_BLH, row, head, chunk, below_KI1, before_K1J, length, heads, OF_ROWS, CHUNK)
        X_KIJ = _merged(X_KIJ, c_KIJ, CHUNK // (PART * 2 ** (merge + 1)), PART * 2**merge)
    place_T = tl.arange(0, CHUNK)
    token_T = chunk * CHUNK + place_T
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + place_T[None, :]
    tl.store(X_BHLT + at_TT, tl.reshape(X_KIJ, [CHUNK, CHUNK]), mask=(token_T < length)[:, None])


@triton.jit
def _triangle(
    P_BHLT: tl.tensor, beta_BLH: tl.tensor, row: tl.tensor, head: tl.tensor, chunk: tl.tensor, i: tl.tensor,
    j: tl.tensor, length: int, heads: int, OF_ROWS: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return P_ij beta_i if OF_ROWS is True, else P_ij beta_j, for tokens i and j of a chunk; 0 unless j < i."""
    below = (j < i) & (chunk * CHUNK + i < length)
    P = tl.load(P_BHLT + ((row * heads + head) * length + chunk * CHUNK + i) * CHUNK + j, mask=below, other=0.0)
    token = chunk * CHUNK + (i if OF_ROWS else j)
    return P * tl.load(beta_BLH + (row * length + token) * heads + head, mask=token < length, other=0.0)


@triton.jit
def _merged(X_KIJ: tl.tensor, c_KIJ: tl.tensor, PAIRS: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Merge pairs (a, b) of inverted diagonal blocks in X into inverses twice as large.

    c is the block below a in the matrix that is inverted.
    """
    a_KIJ, b_KIJ = tl.split(tl.permute(tl.reshape(X_KIJ, [PAIRS, 2, SIZE, SIZE]), [0, 2, 3, 1]))
    c_KIJ = tl.dot(b_KIJ, tl.dot(c_KIJ, a_KIJ, input_precision="tf32x3"), input_precision="tf32x3")
    above_KI2J = tl.permute(tl.join(a_KIJ, tl.zeros_like(a_KIJ)), [0, 1, 3, 2])
    below_KI2J = tl.permute(tl.join(-c_KIJ, b_KIJ), [0, 1, 3, 2])
    return tl.reshape(tl.permute(tl.join(above_KI2J, below_KI2J), [0, 4, 1, 2, 3]), [PAIRS, 2 * SIZE, 2 * SIZE])


@triton.jit
def beta_of_chunk(
    beta_BLH: tl.tensor, row: tl.tensor, head: tl.tensor, token_T: tl.tensor, length: int, heads: int,
) -> tl.tensor:  # fmt: skip
    """Load beta for a chunk's tokens; beyond the row's end, beta is 0."""
    return tl.load(beta_BLH + (row * length + token_T) * heads + head, mask=token_T < length, other=0.0)


@triton.jit
def kept(whole_BCHG: tl.tensor, index: tl.tensor, state_NP: tl.tensor, n_N: tl.tensor, BY_HEAD: tl.constexpr,
         N: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Return W h, with 0 where W is 0, even if h is infinite."""
    if BY_HEAD:
        whole_N = tl.load(whole_BCHG + index) + tl.zeros_like(n_N).to(tl.float32)
    else:
        whole_N = tl.load(whole_BCHG + index * N + n_N, mask=n_N < N, other=0.0)
    return tl.where(whole_N[:, None] == 0.0, 0.0, whole_N[:, None] * state_NP)


@triton.jit
def walk(
    v_BLHP: tl.tensor, beta_BLH: tl.tensor, starts_BL: tl.tensor, k_enter_BLHN: tl.tensor, k_leave_BLHN: tl.tensor,
    whole_BCHG: tl.tensor, X_BHLT: tl.tensor, start_BHNP: tl.tensor, end_BHNP: tl.tensor, before_BCHNP: tl.tensor,
    w_BLHP: tl.tensor, length: int, heads: int, chunks: int, START: tl.constexpr, BY_HEAD: tl.constexpr,
    DOCUMENTS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store w, the state before each chunk, and the state after the row.

    A program computes VALUES value channels of one head, with all key channels. Grid: (value slices, heads, rows). The
    state (BLOCK_N, VALUES) stays in registers over the loop.
    """
    n_N = tl.arange(0, BLOCK_N)
    p_P = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at_NP = n_N[:, None] * P + p_P[None, :]
    there_NP = tl.expand_dims(n_N < N, 1) & tl.expand_dims(p_P < P, 0)
    border = (row * heads + head) * N * P
    state_NP = tl.zeros([BLOCK_N, VALUES], tl.float32)
    if START:
        state_NP = tl.load(start_BHNP + border + at_NP, mask=there_NP, other=0.0)
    for chunk in range(chunks):
        token_T = chunk * CHUNK + tl.arange(0, CHUNK)
        index = (row * chunks + chunk) * heads + head
        tl.store(before_BCHNP + index * N * P + at_NP, state_NP, mask=there_NP)
        lost_1P = tl.zeros([1, VALUES], tl.int32)
        if DOCUMENTS:
            through = tl.sum(begins(starts_BL, row, token_T, length), axis=0) == 0
            lost_1P = lost(state_NP)
            state_NP = tl.where(lost_1P > 0, 0.0, state_NP)
            lost_1P = tl.where(through, lost_1P, 0)
        k_TN = tokens_by_channel(k_enter_BLHN, row, token_T, head, n_N, length, heads, N)
        v_TP = tokens_by_channel(v_BLHP, row, token_T, head, p_P, length, heads, P).to(tl.float32)
        X_TT = scores_of_chunk(X_BHLT, row, head, token_T, length, heads, CHUNK)
        w_TP = product(X_TT, v_TP - product(k_TN, state_NP, PRODUCT, PRECISION), PRODUCT, PRECISION)
        at_TP = ((row * length + token_T) * heads + head)[:, None] * P + p_P[None, :]
        tl.store(w_BLHP + at_TP, w_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(p_P < P, 0))
        u_TP = beta_of_chunk(beta_BLH, row, head, token_T, length, heads)[:, None] * w_TP
        k_NT = tl.trans(tokens_by_channel(k_leave_BLHN, row, token_T, head, n_N, length, heads, N))
        state_NP = kept(whole_BCHG, index, state_NP, n_N, BY_HEAD, N) + product(k_NT, u_TP, PRODUCT, PRECISION)
        state_NP = tl.where(lost_1P > 0, float("nan"), state_NP)
    tl.store(end_BHNP + border + at_NP, state_NP, mask=there_NP)


@triton.jit
def lost(state_NP: tl.tensor) -> tl.tensor:
    """Return a tensor (1, P): 1 if the state has an infinite or NaN entry in a value channel, else 0."""
    return tl.expand_dims(tl.max(tl.where(tl.abs(state_NP) < float("inf"), 0, 1), axis=0), 0)


@triton.jit
def outputs(
    A_BHLT: tl.tensor, beta_BLH: tl.tensor, w_BLHP: tl.tensor, q_enter_BLHN: tl.tensor, starts_BL: tl.tensor,
    before_BCHNP: tl.tensor, y_BLHP: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store y for a chunk's tokens and VALUES value channels. Grid: (chunks, heads * value slices, rows)."""
    across: tl.constexpr = BLOCK_P // VALUES
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    p_P = tl.program_id(1) % across * VALUES + tl.arange(0, VALUES)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    y_TP = tl.zeros([CHUNK, VALUES], tl.float32)
    lost_1P = tl.zeros([1, VALUES], tl.int32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        q_TN = tokens_by_channel(q_enter_BLHN, row, token_T, head, n_N, length, heads, N)
        state_NP = state_block(before_BCHNP, index, n_N, p_P, N, P)
        if DOCUMENTS:
            lost_1P = tl.maximum(lost_1P, lost(state_NP))
            state_NP = tl.where(tl.abs(state_NP) < float("inf"), state_NP, 0.0)
        y_TP += product(q_TN, state_NP, PRODUCT, PRECISION)
    if DOCUMENTS:
        begun_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        y_TP = tl.where((begun_T == 0)[:, None] & (lost_1P > 0), float("nan"), y_TP)
    w_TP = tokens_by_channel(w_BLHP, row, token_T, head, p_P, length, heads, P).to(tl.float32)
    u_TP = beta_of_chunk(beta_BLH, row, head, token_T, length, heads)[:, None] * w_TP
    score_TT = scores_of_chunk(A_BHLT, row, head, token_T, length, heads, CHUNK)
    y_TP += product(score_TT, u_TP, PRODUCT, PRECISION)
    at_TP = ((row * length + token_T) * heads + head)[:, None] * P + p_P[None, :]
    tl.store(y_BLHP + at_TP, y_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(p_P < P, 0))
