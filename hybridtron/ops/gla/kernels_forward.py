"""Triton kernels of gated linear attention, forward: states of chunks, scores inside them, outputs.

With F_i the product of the decays over a chunk's tokens up to i, L_j that over the tokens after j, E_ij that after j up
to i, and W over all, entry by entry of the key:

    chunk_states    what a chunk adds to the state:      sum_j (L_j k_j) v_j^T
    pass_states     h after = W h before + added         one chunk after another, each put in the place of the last
    scores          A_ij = sum over n of q_in E_ijn k_jn
    outputs         y_i = sum_{j <= i} A_ij v_j + h^T (F_i q_i)

A sum of log decays runs over just the tokens that it is for, so that no difference of sums is taken and no exponent is
above 0. For scores a chunk is cut into parts: with r the first token of i's part, E_ij is F since r times what is left
of j before r, which is a matrix product; inside a part E grows from token to token by a factor.

Where a document begins the log decay counts as minus infinity: all that leads over it is 0. What the state gives is
masked besides, as 0 times infinity is no zero. No kernel adds up in an order that depends on the schedule.

Legend: B rows, L tokens, H heads, N key size, P value size; T tokens of a chunk, O of a part. Scores are (B, H, L, T),
states between chunks (B, chunks, H, N, P).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel


@triton.jit
def begins(starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, length: int) -> tl.tensor:
    """1 where a token begins a document, else 0."""
    return tl.load(starts_BL + row * length + token_T, mask=token_T < length, other=0).to(tl.int32)


@triton.jit
def log_decays(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, wanted_T: tl.tensor, head: tl.tensor,
    n_N: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """g of the wanted tokens, minus infinity where a document begins, and 0 for the others."""
    g_TN = tokens_by_channel(g_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
    if DOCUMENTS:
        g_TN = tl.where(begins(starts_BL, row, token_T, length)[:, None] != 0, float("-inf"), g_TN)
    return tl.where(wanted_T[:, None], g_TN, 0.0)


@triton.jit
def summed(g_TN: tl.tensor, FROM_END: tl.constexpr) -> tl.tensor:
    """Sums over tokens, up to each or from each on. Triton 3.6 can sum a single column as a vector alone."""
    columns: tl.constexpr = g_TN.shape[1]  # pyrefly: ignore
    if columns == 1:
        summed_TN = tl.cumsum(tl.ravel(g_TN), axis=0, reverse=FROM_END)[:, None]
    else:
        summed_TN = tl.cumsum(g_TN, axis=0, reverse=FROM_END)
    return summed_TN


@triton.jit
def since_start(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, wanted_T: tl.tensor, head: tl.tensor,
    n_N: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The product of the decays of the wanted tokens up to each."""
    g_TN = log_decays(g_BLHN, starts_BL, row, token_T, wanted_T, head, n_N, length, heads, DOCUMENTS, N)
    return tl.exp(summed(g_TN, False))


@triton.jit
def to_end(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, end: tl.tensor, head: tl.tensor,
    n_N: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The product of the decays after each token and before `end`."""
    next_T = token_T + 1
    g_TN = log_decays(g_BLHN, starts_BL, row, next_T, next_T < end, head, n_N, length, heads, DOCUMENTS, N)
    return tl.exp(summed(g_TN, True))


@triton.jit
def state_block(
    states_BCHNP: tl.tensor, index: tl.tensor, n_N: tl.tensor, p_P: tl.tensor, N: tl.constexpr, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of the state of one head at one chunk (N, P), zeros beyond."""
    there_NP = tl.expand_dims(n_N < N, 1) & tl.expand_dims(p_P < P, 0)
    return tl.load(states_BCHNP + index * N * P + n_N[:, None] * P + p_P[None, :], mask=there_NP, other=0.0)


@triton.jit
def chunk_states(
    left_BLHN: tl.tensor, right_BLHP: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, states_BCHNP: tl.tensor,
    whole_BCHN: tl.tensor, length: int, heads: int, REVERSED: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """sum_j (L_j k_j) v_j^T, and W; reversed, from q and dy: sum_i (F_i q_i) dy_i^T."""
    across: tl.constexpr = BLOCK_P // VALUES
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slices: tl.constexpr = BLOCK_N // KEYS * across
    head, place = tl.program_id(1) // slices, tl.program_id(1) % slices
    n_N, p_P = place // across * KEYS + tl.arange(0, KEYS), place % across * VALUES + tl.arange(0, VALUES)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_T = token_T < length
    since_TN = since_start(g_BLHN, starts_BL, row, token_T, inside_T, head, n_N, length, heads, DOCUMENTS, N)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    if REVERSED:
        weight_TN = since_TN
    else:
        end = tl.minimum((chunk + 1) * CHUNK, length)
        weight_TN = to_end(g_BLHN, starts_BL, row, token_T, end, head, n_N, length, heads, DOCUMENTS, N)
        whole_N = tl.min(since_TN, axis=0)
        tl.store(whole_BCHN + index * N + n_N, whole_N, mask=(n_N < N) & (place % across == 0))
    left_TN = tokens_by_channel(left_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32) * weight_TN
    right_TP = tokens_by_channel(right_BLHP, row, token_T, head, p_P, length, heads, P)
    added_NP = product(tl.trans(left_TN), right_TP, PRODUCT, PRECISION)
    there_NP = tl.expand_dims(n_N < N, 1) & tl.expand_dims(p_P < P, 0)
    tl.store(states_BCHNP + index * N * P + n_N[:, None] * P + p_P[None, :], added_NP, mask=there_NP)


@triton.jit
def pass_states(
    states_BCHNP: tl.tensor, whole_BCHN: tl.tensor, start_BHNP: tl.tensor, end_BHNP: tl.tensor,
    before_BCHNP: tl.tensor, through_BCHN: tl.tensor, chunks: int, heads: int, START: tl.constexpr,
    REVERSED: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """In the place of what every chunk adds, the state that it starts from; and the state after the last one.

    Reversed, these are gradients, from the last chunk to the first; `through` gets W times the sum of h dh.
    """
    n_N, p_P = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_P)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    there_NP = tl.expand_dims(n_N < N, 1) & tl.expand_dims(p_P < P, 0)
    at_NP = n_N[:, None] * P + p_P[None, :]
    at_border = (row * heads + head) * N * P
    state_NP = tl.zeros([ROWS, BLOCK_P], tl.float32)
    if START:
        state_NP = tl.load(start_BHNP + at_border + at_NP, mask=there_NP, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSED else step
        index = (row * chunks + chunk) * heads + head
        added_NP = tl.load(states_BCHNP + index * N * P + at_NP, mask=there_NP, other=0.0)
        tl.store(states_BCHNP + index * N * P + at_NP, state_NP, mask=there_NP)
        whole_N1 = tl.load(whole_BCHN + index * N + n_N, mask=n_N < N, other=0.0)[:, None]
        kept_NP = tl.where(whole_N1 == 0.0, 0.0, whole_N1 * state_NP)
        if REVERSED:
            before_NP = tl.load(before_BCHNP + index * N * P + at_NP, mask=there_NP, other=0.0)
            worth_N = tl.sum(tl.where(kept_NP == 0.0, 0.0, kept_NP * before_NP), axis=1)
            tl.store(through_BCHN + index * N + n_N, worth_N, mask=n_N < N)
        state_NP = kept_NP + added_NP
    tl.store(end_BHNP + at_border + at_NP, state_NP, mask=there_NP)


@triton.jit
def scores(
    q_BLHN: tl.tensor, k_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, scores_BHLT: tl.tensor, length: int,
    heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A of the tokens of a part, with all tokens of its chunk."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, chunk = tl.program_id(0) * PART, tl.program_id(0) // (CHUNK // PART)
    token_O, token_T = first + tl.arange(0, PART), chunk * CHUNK + tl.arange(0, CHUNK)
    score_OT = tl.zeros([PART, CHUNK], tl.float32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        q_ON = tokens_by_channel(q_BLHN, row, token_O, head, n_N, length, heads, N).to(tl.float32)
        k_TN = tokens_by_channel(k_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
        since_ON = since_start(
            g_BLHN, starts_BL, row, token_O, token_O < length, head, n_N, length, heads, DOCUMENTS, N
        )
        until_TN = to_end(g_BLHN, starts_BL, row, token_T, first, head, n_N, length, heads, DOCUMENTS, N)
        k_TN = tl.where((token_T < first)[:, None], k_TN * until_TN, 0.0)
        score_OT += product(q_ON * since_ON, tl.trans(k_TN), PRODUCT, PRECISION)
        between_ON = tl.zeros([PART, KEYS], tl.float32)
        for step in range(PART):
            other = first + PART - 1 - step
            decay_1N = one_decay(g_BLHN, starts_BL, row, other + 1, head, n_N, length, heads, DOCUMENTS, N)
            between_ON = tl.where((token_O == other)[:, None], 1.0, between_ON * decay_1N)
            k_1N = one_token(k_BLHN, row, other, head, n_N, length, heads, N)
            found_O = tl.sum(q_ON * between_ON * k_1N, axis=1)
            score_OT += tl.where((token_T == other)[None, :], found_O[:, None], 0.0)
    at_OT = ((row * heads + head) * length + token_O)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(scores_BHLT + at_OT, score_OT, mask=(token_O < length)[:, None])


@triton.jit
def one_token(
    x_BLHN: tl.tensor, row: tl.tensor, token: tl.tensor, head: tl.tensor, n_N: tl.tensor, length: int, heads: int,
    N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """x of a token (1, N), zeros beyond."""
    at_N = ((row * length + token) * heads + head) * N + n_N
    return tl.load(x_BLHN + at_N, mask=(n_N < N) & (token < length), other=0.0).to(tl.float32)[None, :]


@triton.jit
def one_decay(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token: tl.tensor, head: tl.tensor, n_N: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The decay of a token (1, N), 0 where it begins a document."""
    decay_1N = tl.exp(one_token(g_BLHN, row, token, head, n_N, length, heads, N))
    if DOCUMENTS:
        begun = tl.load(starts_BL + row * length + token, mask=token < length, other=0)
        decay_1N = tl.where(begun != 0, 0.0, decay_1N)
    return decay_1N


@triton.jit
def scores_of_chunk(
    scores_BHLT: tl.tensor, row: tl.tensor, head: tl.tensor, token_T: tl.tensor, length: int, heads: int,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """All of a chunk (T, T), zeros beyond the row."""
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(scores_BHLT + at_TT, mask=tl.expand_dims(token_T < length, 1), other=0.0)


@triton.jit
def outputs(
    scores_BHLT: tl.tensor, q_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, v_BLHP: tl.tensor,
    before_BCHNP: tl.tensor, y_BLHP: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """y of a chunk's tokens, some values of one head."""
    across: tl.constexpr = BLOCK_P // VALUES
    chunk, head, row = tl.program_id(0), tl.program_id(1) // across, tl.program_id(2).to(tl.int64)
    p_P = tl.program_id(1) % across * VALUES + tl.arange(0, VALUES)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    seen_TP = tl.zeros([CHUNK, VALUES], tl.float32)
    for start in range(0, BLOCK_N, KEYS):
        n_N = start + tl.arange(0, KEYS)
        q_TN = tokens_by_channel(q_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
        q_TN *= since_start(g_BLHN, starts_BL, row, token_T, token_T < length, head, n_N, length, heads, DOCUMENTS, N)
        seen_TP += product(q_TN, state_block(before_BCHNP, index, n_N, p_P, N, P), PRODUCT, PRECISION)
    if DOCUMENTS:
        begun_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        seen_TP = tl.where((begun_T > 0)[:, None], 0.0, seen_TP)
    v_TP = tokens_by_channel(v_BLHP, row, token_T, head, p_P, length, heads, P)
    score_TT = scores_of_chunk(scores_BHLT, row, head, token_T, length, heads, CHUNK)
    y_TP = seen_TP + product(score_TT, v_TP, PRODUCT, PRECISION)
    at_TP = ((row * length + token_T) * heads + head)[:, None] * P + p_P[None, :]
    tl.store(y_BLHP + at_TP, y_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(p_P < P, 0))
