"""Triton kernels for gated linear attention, forward: states between chunks, and outputs.

`reference.py` has the recurrence over tokens. Here, h is the state before a chunk of tokens. Three products of the
chunk's decays are used, for each key channel:

    F_i     over the tokens up to i
    L_j     over the tokens after j
    W       over all tokens

F, L and W multiply vectors over key channels elementwise. The kernels compute

    chunk_states    the chunk's addition to the state:   sum_j (L_j k_j) v_j^T
    pass_states     next state = W h + addition          in a loop over the chunks
    outputs         y_i = sum_{j <= i} A_ij v_j + h^T (F_i q_i)

F, L and W are computed as exponentials of sums of log decays. Log decays are at most 0, and no sum is subtracted from
another. So no exponent is above 0.

A are the scores: A_ij is what token i reads from token j of the same chunk. `kernels_pairs` computes them.

Where a document begins, the log decay is set to minus infinity, so every product that includes this decay is 0. But h
may have infinite entries, and 0 times infinity is NaN. Therefore the term h^T (F_i q_i) is set to 0 after the
multiplication, if a document begins in the chunk at or before i. No kernel uses atomics, so results are deterministic.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels n, P value channels p, C chunks, T
tokens per chunk. Scores are (B, H, L, T), and states are (B, C, H, N, P).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.ssd.kernels_forward import product, tokens_by_channel

FORGOTTEN = tl.constexpr(-200.0)  # a log decay whose exponential is 0 in fp32


@triton.jit
def begins(starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, length: int) -> tl.tensor:
    """Return a tensor (T,): 1 if a token begins a document, else 0."""
    return tl.load(starts_BL + row * length + token_T, mask=token_T < length, other=0).to(tl.int32)


@triton.jit
def log_decays(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, wanted_T: tl.tensor, head: tl.tensor,
    n_N: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load g (T, N). Set it to minus infinity where a document begins, and to 0 where `wanted_T` is False."""
    g_TN = tokens_by_channel(g_BLHN, row, token_T, head, n_N, length, heads, N).to(tl.float32)
    if DOCUMENTS:
        g_TN = tl.where(begins(starts_BL, row, token_T, length)[:, None] != 0, float("-inf"), g_TN)
    return tl.where(wanted_T[:, None], g_TN, 0.0)


@triton.jit
def summed(g_TN: tl.tensor, FROM_END: tl.constexpr) -> tl.tensor:
    """Return the cumulative sum over tokens; with FROM_END it runs from the last token to the first.

    A tensor with one column is summed as a vector, because Triton 3.6 can't compute its cumulative sum as a matrix.
    """
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
    """Return F (T, N): for each token, the decays' product over all wanted tokens up to it."""
    g_TN = log_decays(g_BLHN, starts_BL, row, token_T, wanted_T, head, n_N, length, heads, DOCUMENTS, N)
    return tl.exp(summed(g_TN, False))


@triton.jit
def to_end(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, end: tl.tensor, head: tl.tensor,
    n_N: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return L (T, N): for each token, the decays' product over all tokens after it and before `end`."""
    next_T = token_T + 1
    g_TN = log_decays(g_BLHN, starts_BL, row, next_T, next_T < end, head, n_N, length, heads, DOCUMENTS, N)
    return tl.exp(summed(g_TN, True))


@triton.jit
def sums_by_mask(mask_TT: tl.tensor, x_TN: tl.tensor, PRODUCT: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Return, for each row of the mask, the sum of x over the tokens at which the mask is True.

    The sums have fp32's precision: bf16 holds the mask without rounding, and three bf16 numbers hold x.
    """
    if tl.float32 == PRODUCT and PRECISION == "ieee":
        summed_TN = tl.dot(mask_TT.to(tl.float32), x_TN, input_precision="ieee")
    else:
        one_TT = mask_TT.to(tl.float32).to(tl.bfloat16)  # the interpreter casts no mask to bf16
        high_TN = x_TN.to(tl.bfloat16)
        rest_TN = x_TN - high_TN.to(tl.float32)
        middle_TN = rest_TN.to(tl.bfloat16)
        low_TN = (rest_TN - middle_TN.to(tl.float32)).to(tl.bfloat16)
        summed_TN = tl.dot(one_TT, low_TN)
        summed_TN = tl.dot(one_TT, middle_TN, summed_TN)
        summed_TN = tl.dot(one_TT, high_TN, summed_TN)
    return summed_TN


@triton.jit
def finite_decays(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, n_N: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load g (T, N) for `sums_by_mask`, raised to at least FORGOTTEN, because 0 times minus infinity is NaN."""
    g_TN = log_decays(g_BLHN, starts_BL, row, token_T, token_T < length, head, n_N, length, heads, DOCUMENTS, N)
    return tl.where(g_TN < FORGOTTEN, FORGOTTEN, g_TN)


@triton.jit
def left_to_end(
    g_BLHN: tl.tensor, starts_BL: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, n_N: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, N: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return L (T, N), the product of the decays after each token, up to the end of the chunk.

    A reversed cumulative sum needs many shuffles. Where tensor cores multiply, a matrix multiplication replaces it.
    """
    if tl.float32 == PRODUCT and PRECISION == "ieee":
        end = tl.max(token_T, axis=0) + 1
        end = tl.minimum(end, length)
        left_TN = to_end(g_BLHN, starts_BL, row, token_T, end, head, n_N, length, heads, DOCUMENTS, N)
    else:
        g_TN = finite_decays(g_BLHN, starts_BL, row, token_T, head, n_N, length, heads, DOCUMENTS, N)
        left_TN = tl.exp(sums_by_mask(token_T[:, None] < token_T[None, :], g_TN, PRODUCT, PRECISION))
    return left_TN


@triton.jit
def state_block(
    states_BCHNP: tl.tensor, index: tl.tensor, n_N: tl.tensor, p_P: tl.tensor, N: tl.constexpr, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a tile (N, P) of one state. `index` counts states over rows, chunks and heads. Padding is set to 0."""
    there_NP = tl.expand_dims(n_N < N, 1) & tl.expand_dims(p_P < P, 0)
    return tl.load(states_BCHNP + index * N * P + n_N[:, None] * P + p_P[None, :], mask=there_NP, other=0.0)


@triton.jit
def chunk_states(
    left_BLHN: tl.tensor, right_BLHP: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, states_BCHNP: tl.tensor,
    whole_BCHN: tl.tensor, length: int, heads: int, REVERSED: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store a chunk's addition to the state in `states`, and W in `whole`.

    The addition is sum_j (L_j k_j) v_j^T, with k in `left` and v in `right`. With REVERSED, the kernel stores the
    chunk's addition to the state gradient instead: sum_i (F_i q_i) dy_i^T, with q in `left` and dy in `right`. W is
    then not stored. A program computes a tile (KEYS, VALUES). Grid: (chunks, heads * key slices * value slices, rows).
    """
    across: tl.constexpr = BLOCK_P // VALUES
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slices: tl.constexpr = BLOCK_N // KEYS * across
    head, place = tl.program_id(1) // slices, tl.program_id(1) % slices
    n_N = place // across * KEYS + tl.arange(0, KEYS)
    p_P = place % across * VALUES + tl.arange(0, VALUES)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_T = token_T < length
    index = (row * tl.num_programs(0) + chunk) * heads + head
    if REVERSED:
        weight_TN = since_start(g_BLHN, starts_BL, row, token_T, inside_T, head, n_N, length, heads, DOCUMENTS, N)
    else:
        weight_TN = left_to_end(
            g_BLHN, starts_BL, row, token_T, head, n_N, length, heads, DOCUMENTS, N, PRODUCT, PRECISION
        )
        g_TN = log_decays(g_BLHN, starts_BL, row, token_T, inside_T, head, n_N, length, heads, DOCUMENTS, N)
        whole_N = tl.exp(tl.sum(g_TN, axis=0))
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
    """Replace each chunk's addition in `states` by the state before the chunk, and store the state after the row.

    `start` is the state before the row (without START it is not read, and zeros are used). `end` is the output for the
    state after the row. Grid: (slices with ROWS key channels, heads, rows).

    With REVERSED, the same recurrence is computed for state gradients, from the last chunk to the first. Then `start`
    is the state gradient after the row, `end` gets the state gradient before the row, and `states` gets dh, the state
    gradient after each chunk. `before` is an input: the states h before the chunks. `through` is an output: W sum_p h
    dh for each key channel. Without REVERSED, `before` and `through` are not used.
    """
    n_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p_P = tl.arange(0, BLOCK_P)
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
def scores_of_chunk(
    scores_BHLT: tl.tensor, row: tl.tensor, head: tl.tensor, token_T: tl.tensor, length: int, heads: int,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a chunk's scores (T, T); the scores of queries beyond the row's end are 0."""
    at_TT = ((row * heads + head) * length + token_T)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(scores_BHLT + at_TT, mask=tl.expand_dims(token_T < length, 1), other=0.0)


@triton.jit
def outputs(
    scores_BHLT: tl.tensor, q_BLHN: tl.tensor, g_BLHN: tl.tensor, starts_BL: tl.tensor, v_BLHP: tl.tensor,
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
