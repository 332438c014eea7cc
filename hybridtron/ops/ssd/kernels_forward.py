"""Triton kernels for the forward pass of the SSD scan.

The scan is h_t = exp(g_t) h_{t-1} + v_t B_t^T, y_t = h_t C_t + D x_t, with g = delta A and v = delta x. It is computed
in chunks of tokens. S_i is g summed over the chunk's tokens up to i, S_T is g summed over the full chunk, and h is the
state before the chunk. Four kernels run one after another:

    decays          delta, S and the factors exp(S_i), exp(S_T - S_i), exp(S_T)
    walk            the state after each chunk:                exp(S_T) h + sum_j exp(S_T - S_j) v_j B_j^T
    group_scores    C_i . B_j, if several heads share B and C
    outputs         y_i = sum_{j <= i} exp(S_i - S_j) (C_i . B_j) v_j + exp(S_i) h C_i + D x_i

`walk` goes through a row's chunks in order, and keeps the state in registers, so additions to the state never go
through memory. Where few rows and heads would leave most of a GPU idle, a program computes a narrower slice of the
state (`SSDRow.walk_slices`).

The flag ITSELF is for `decay_scan`. With it, later tokens i > j see token j with the factor delta_j, but token j sees
itself with another factor, itself_j. So the sum for y_i is over j < i, and D x_i becomes (D + itself_i C_i . B_i) x_i.

A difference between two sums S decides how much a token remembers. In fp32, a few strong decays would make S large, and
its rounding would hide the small decays after them. `decays` therefore stores each S as two fp32 numbers, high + low,
and adds such pairs (`add_exactly`). A difference between two such sums has a relative error near fp32's: if the two
high parts are close, fp32 subtracts them without rounding; else the rounding is small relative to the difference.

A token sees h only if it belongs to h's document; else exp(S_i) is replaced by 0. The product exp(S_i) h C_i is then
masked too, since 0 times infinity is NaN. No kernel uses atomics, so results are deterministic. `kernels_backward` has
the backward pass, and `kernels` has the launches.

Legend: B rows, L tokens, H heads, P head size, G head groups that share B and C, N state size, C chunks (in state
shapes), T tokens in a chunk, O tokens in the chunk that a program computes (its own tokens), K slices of a state. Loops
over a chunk's tokens take as many of them at a time as a program has own tokens. Tensors with one number per token and
head are (B, H, L). States before or after chunks are (B, C, H, P, N).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)) for an fp32 tensor; where exp(x) is small, 1 + exp(x) would lose its digits.

    With z = u / (2 + u) and u = exp(-|x|), log(1 + u) is 2 (z + z^3 / 3 + z^5 / 5 + ...). z is at most 1/3, so after
    eight terms the rest is below 2e-9 of the sum.
    """
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    series = square * (1.0 / 15.0) + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * (z + z * square * series)


@triton.jit
def add_exactly(high: tl.tensor, low: tl.tensor, other_high: tl.tensor, other_low: tl.tensor) -> tuple:
    """Add two numbers, each the sum of two fp32 numbers, high + low. Return the high and low of their sum.

    The sum has about 48 correct bits (Knuth's two-sum). Float64 would be exact too, at half of fp32's rate.
    """
    total = high + other_high
    added = total - high
    error = (high - (total - added)) + (other_high - added) + (low + other_low)
    rounded = total + error
    return rounded, error - (rounded - total)


@triton.jit
def decays(
    dt_BLH: tl.tensor, dt_bias_H: tl.tensor, A_H: tl.tensor, step_BLH: tl.tensor, own_step_BLH: tl.tensor,
    documents_BL: tl.tensor, itself_BHL: tl.tensor, delta_BHL: tl.tensor, high_BHL: tl.tensor, low_BHL: tl.tensor,
    enter_BHL: tl.tensor, leave_BHL: tl.tensor, whole_BHC: tl.tensor, dt_row: int, dt_token: int, length: int,
    heads: int, DOCUMENTS: tl.constexpr, LOG_DECAYS: tl.constexpr, ITSELF: tl.constexpr, CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Store a chunk's decays for HEADS heads. Grid: (chunks, head blocks, rows).

    The outputs have a number for each token i; only `whole` has a number for each chunk:

        delta       the step
        high, low   two numbers whose sum is S_i
        enter       exp(S_i), or 0 if token i is not in the document of the state before the chunk
        leave       exp(S_T - S_i), or 0 if token i is not in the document of the chunk's last token
        whole       exp(S_T), or 0 if these two documents differ
        itself      with ITSELF, a copy of the input `own_step`

    With LOG_DECAYS, the input `dt` holds g, and delta is 1. With both LOG_DECAYS and ITSELF, delta is the input `step`.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside_T = token_T < length
    heads_there = head_H < heads
    there_TH = inside_T[:, None] & heads_there[None, :]
    at_dt_TH = row * dt_row + token_T.to(tl.int64)[:, None] * dt_token + head_H[None, :]
    at_step_TH = (row * length + token_T)[:, None] * heads + head_H[None, :]
    delta_TH, g_TH = _steps(dt_BLH + at_dt_TH, dt_bias_H + head_H, A_H + head_H, there_TH, heads_there, LOG_DECAYS)
    g_parts = g_TH, tl.zeros_like(g_TH)
    high_TH, low_TH = tl.associative_scan(g_parts, 0, add_exactly)
    total_H, total_low_H = tl.reduce(g_parts, 0, add_exactly)
    # delta, high and low must be stored before they are used again. After another use, Triton 3.6 may store a copy in
    # another layout, with its elements in the wrong order.
    at_TH = (row * heads + head_H)[None, :] * length + token_T[:, None]
    if ITSELF:
        delta_TH = tl.load(step_BLH + at_step_TH, mask=there_TH, other=0.0).to(tl.float32)
        tl.store(itself_BHL + at_TH, tl.load(own_step_BLH + at_step_TH, mask=there_TH, other=0.0), mask=there_TH)
    tl.store(delta_BHL + at_TH, delta_TH, mask=there_TH)
    tl.store(high_BHL + at_TH, high_TH, mask=there_TH)
    tl.store(low_BHL + at_TH, low_TH, mask=there_TH)
    left_TH = (total_H[None, :] - high_TH) + (total_low_H[None, :] - low_TH)
    enter_TH = tl.exp(high_TH)
    leave_TH = tl.exp(left_TH)
    whole_H = tl.exp(total_H)
    if DOCUMENTS:
        first, last = _border_documents(documents_BL + row * length, chunk, length, CHUNK)
        document_T = tl.load(documents_BL + row * length + token_T, mask=inside_T, other=-1)
        enter_TH = tl.where((document_T == first)[:, None], enter_TH, 0.0)
        leave_TH = tl.where((document_T == last)[:, None], leave_TH, 0.0)
        whole_H = tl.where(first == last, whole_H, 0.0)
    tl.store(enter_BHL + at_TH, enter_TH, mask=there_TH)
    tl.store(leave_BHL + at_TH, leave_TH, mask=there_TH)
    tl.store(whole_BHC + (row * heads + head_H) * tl.num_programs(0) + chunk, whole_H, mask=heads_there)


@triton.jit
def _steps(
    dt_TH: tl.tensor, dt_bias_H: tl.tensor, A_H: tl.tensor, there_TH: tl.tensor, heads_there: tl.tensor,
    LOG_DECAYS: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return delta and g in fp32; the arguments `dt_TH`, `dt_bias_H` and `A_H` are pointers."""
    dt_TH = tl.load(dt_TH, mask=there_TH, other=0.0).to(tl.float32)
    if LOG_DECAYS:
        delta_TH = tl.where(there_TH, 1.0, 0.0)
        g_TH = dt_TH
    else:
        shifted_TH = dt_TH + tl.load(dt_bias_H, mask=heads_there, other=0.0)[None, :]
        delta_TH = tl.where(there_TH, _softplus(shifted_TH), 0.0)
        g_TH = delta_TH * tl.load(A_H, mask=heads_there, other=0.0)[None, :]
    return delta_TH, g_TH


@triton.jit
def _border_documents(
    documents_L: tl.tensor, chunk: tl.tensor, length: int, CHUNK: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return the documents to which the states before and after a chunk belong.

    The state before a chunk belongs to the document of the token before the chunk; the state before the row belongs to
    token 0's document. The state after a chunk belongs to the document of the chunk's last token.
    """
    before = tl.maximum(chunk * CHUNK - 1, 0)
    after = tl.minimum((chunk + 1) * CHUNK, length) - 1
    return tl.load(documents_L + before), tl.load(documents_L + after)


@triton.jit
def product(left: tl.tensor, right: tl.tensor, PRODUCT: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Cast two tiles to the dtype PRODUCT, and return their matrix product, accumulated in fp32."""
    left = left.to(PRODUCT)  # pyrefly: ignore[bad-argument-type]
    right = right.to(PRODUCT)  # pyrefly: ignore[bad-argument-type]
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def tokens_by_channel(
    x_BLHP: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, channel_P: tl.tensor, length: int,
    heads: int, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a tile (T, P) of x for some tokens and one head; entries for tokens or channels out of range are 0.

    The function also loads B and C; then `heads` and `head` stand for groups, and P stands for N.
    """
    at_TP = ((row * length + token_T) * heads + head)[:, None] * P + channel_P[None, :]
    return tl.load(
        x_BLHP + at_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(channel_P < P, 0), other=0.0
    )


@triton.jit
def strided_tokens(
    x_LP: tl.tensor, stride: int, first: tl.tensor, T: tl.constexpr, channel_P: tl.tensor, length: int, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a tile (T, P) of x for the T tokens from `first` on and one head; entries out of range are 0.

    The pointer `x_LP` is at the head's first channel in a row's first token, and `stride` is the distance between two
    tokens. The function also loads B and C; then the head stands for a group, and P stands for N.
    """
    there_TP = tl.expand_dims(first + tl.arange(0, T) < length, 1) & tl.expand_dims(channel_P < P, 0)
    return tl.load(strided_places(x_LP, stride, first, T, channel_P), mask=there_TP, other=0.0)


@triton.jit
def strided_places(
    x_LP: tl.tensor, stride: int, first: tl.tensor, T: tl.constexpr, channel_P: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the pointers (T, P) for `strided_tokens`.

    Offsets inside the tile are int32, because int64 offsets would need twice as many registers.
    """
    return x_LP + tl.cast(first, tl.int64) * stride + tl.arange(0, T)[:, None] * stride + channel_P[None, :]


@triton.jit
def state_entries(
    states_BCHPN: tl.tensor, index: tl.tensor, p_P: tl.tensor, n_N: tl.tensor, P: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a tile (P, N) of the state at one chunk and head; entries out of range are 0.

    `index` is the position of the pair (chunk, head), counted over all rows.
    """
    there_PN = tl.expand_dims(p_P < P, 1) & tl.expand_dims(n_N < N, 0)
    return tl.load(states_BCHPN + index * P * N + p_P[:, None] * N + n_N[None, :], mask=there_PN, other=0.0)


@triton.jit
def apart(mix_OT: tl.tensor, token_O: tl.tensor, token_T: tl.tensor) -> tuple:
    """Separate the scores of tokens with themselves from all scores (C_o . B_t), because their factors differ.

    Return two tensors: the scores with zeros where o = t, and C_o . B_o, or 0 if token o is not among the tokens t.
    """
    own_OT = token_O[:, None] == token_T[None, :]
    return tl.where(own_OT, 0.0, mix_OT), tl.sum(tl.where(own_OT, mix_OT, 0.0), axis=1)


@triton.jit
def block_scores(
    scores_OT: tl.tensor, left_LN: tl.tensor, right_LN: tl.tensor, left_token: int, right_token: int,
    first_O: tl.tensor, first_T: tl.tensor, length: int, SCORES: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr,
    OWN: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return left_o . right_t for OWN tokens from `first_O` on and OWN tokens from `first_T` on.

    With SCORES, the products are loaded: the pointer `scores_OT` is at the first pair's product, and CHUNK is the
    distance between two tokens o. Without SCORES, they are computed.
    """
    own_O = tl.arange(0, OWN)
    if SCORES:
        return tl.load(scores_OT + own_O[:, None] * CHUNK + own_O[None, :])
    mix_OT = tl.zeros([OWN, OWN], tl.float32)
    for start in range(0, BLOCK_N, SLICE):
        n_N = start + tl.arange(0, SLICE)
        left_ON = strided_tokens(left_LN, left_token, first_O, OWN, n_N, length, N)
        right_TN = strided_tokens(right_LN, right_token, first_T, OWN, n_N, length, N)
        mix_OT += product(left_ON, tl.trans(right_TN), PRODUCT, PRECISION)
    return mix_OT


@triton.jit
def group_scores(
    left_BLGN: tl.tensor, right_BLGN: tl.tensor, scores_BGLT: tl.tensor, left_row: int, left_token: int, right_row: int,
    right_token: int, length: int, groups: int, N: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store left_o . right_t for a group, for OWN tokens o and OWN tokens t of the same chunk.

    Grid: (parts with OWN tokens each, groups, rows * parts in a chunk). The last two axes of `scores` are tokens, in
    full chunks, and tokens of the same chunk.
    """
    parts: tl.constexpr = CHUNK // OWN
    group, row = tl.program_id(1), (tl.program_id(2) // parts).to(tl.int64)
    first_O, own_O = tl.program_id(0) * OWN, tl.arange(0, OWN)
    column = tl.program_id(2) % parts * OWN
    left_LN = left_BLGN + row * left_row + group * N
    right_LN = right_BLGN + row * right_row + group * N
    mix_OT = block_scores(
        scores_BGLT, left_LN, right_LN, left_token, right_token, first_O, tl.program_id(0) // parts * CHUNK + column,
        length, tl.constexpr(False), CHUNK, N, OWN, BLOCK_N, SLICE, PRODUCT, PRECISION,
    )  # fmt: skip
    first = ((row * groups + group) * tl.num_programs(0) * OWN + first_O) * CHUNK + column
    tl.store(scores_BGLT + first + own_O[:, None] * CHUNK + own_O[None, :], mix_OT)


@triton.jit
def decay_between(
    high_L: tl.tensor, low_L: tl.tensor, documents_L: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, length: int,
    DOCUMENTS: tl.constexpr, REVERSED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return exp(S_o - S_t) for each own token o and token t, or 0 where o does not see t.

    With REVERSED, return exp(S_t - S_o), or 0 where t does not see o. A token sees itself and earlier tokens in its
    document.
    """
    inside_O = token_O < length
    inside_T = token_T < length
    high_OT = tl.load(high_L + token_O, mask=inside_O, other=0.0)[:, None]
    high_OT = high_OT - tl.load(high_L + token_T, mask=inside_T, other=0.0)[None, :]
    low_OT = tl.load(low_L + token_O, mask=inside_O, other=0.0)[:, None]
    low_OT = low_OT - tl.load(low_L + token_T, mask=inside_T, other=0.0)[None, :]
    sees_OT = tl.expand_dims(inside_O, 1) & tl.expand_dims(inside_T, 0)
    exponent_OT = high_OT + low_OT
    if REVERSED:
        exponent_OT = -exponent_OT
        sees_OT = sees_OT & (token_O[:, None] <= token_T[None, :])
    else:
        sees_OT = sees_OT & (token_O[:, None] >= token_T[None, :])
    if DOCUMENTS:
        document_O = tl.load(documents_L + token_O, mask=inside_O, other=-1)
        document_T = tl.load(documents_L + token_T, mask=inside_T, other=-1)
        sees_OT = sees_OT & (document_O[:, None] == document_T[None, :])
    return tl.exp(tl.where(sees_OT, exponent_OT, float("-inf")))


@triton.jit
def walk(
    left_BLHP: tl.tensor, right_BLGN: tl.tensor, weight_BHL: tl.tensor, delta_BHL: tl.tensor, whole_BHC: tl.tensor,
    start_BHPN: tl.tensor, end_BHPN: tl.tensor, states_BCHPN: tl.tensor, before_BCHPN: tl.tensor,
    through_BCHK: tl.tensor, left_row: int, left_token: int, right_row: int, right_token: int, length: int, heads: int,
    groups: int, chunks: int, START: tl.constexpr, REVERSED: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store the state before every chunk of a row in `states`, and the state after the row in `end`.

    The state before the row is `start`, or zeros without START. A chunk adds sum_t weight_t delta_t x_t B_t^T to the
    state: left is x, right is B. Grid: (slices of N, heads, rows). A program computes a tile (BLOCK_P, SLICE), which
    stays in registers in fp32; `states` has the dtype PRODUCT, to which every reader would cast.

    With REVERSED, the recurrence runs over state gradients, from the last chunk to the first. `start` holds the
    gradient of the state after the row, `states` gets dh, the gradient of the state after each chunk, and `end` gets
    the gradient of the state before the row. A chunk adds sum_t weight_t dy_t C_t^T: left is dy, right is C. `before`
    holds the states h before the chunks. The output `through` gets the sum of exp(S_T) dh h over the tile's entries.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p_P = tl.arange(0, BLOCK_P)
    n_N = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    at_PN = p_P[:, None] * N + n_N[None, :]
    there_PN = tl.expand_dims(p_P < P, 1) & tl.expand_dims(n_N < N, 0)
    at = (row * heads + head) * length
    left_LP = left_BLHP + row * left_row + head * P
    right_LN = right_BLGN + row * right_row + head // (heads // groups) * N
    state_PN = tl.zeros([BLOCK_P, SLICE], tl.float32)
    if START:
        state_PN = tl.load(start_BHPN + (row * heads + head) * P * N + at_PN, mask=there_PN, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSED else step
        token_T = chunk * CHUNK + tl.arange(0, CHUNK)
        inside_T = token_T < length
        weight_T = tl.load(weight_BHL + at + token_T, mask=inside_T, other=0.0)
        if not REVERSED:
            weight_T *= tl.load(delta_BHL + at + token_T, mask=inside_T, other=0.0)
        left_TP = strided_tokens(left_LP, left_token, chunk * CHUNK, CHUNK, p_P, length, P)
        right_TN = strided_tokens(right_LN, right_token, chunk * CHUNK, CHUNK, n_N, length, N)
        weighted_TP = left_TP.to(tl.float32) * weight_T[:, None]
        added_PN = product(tl.trans(weighted_TP), right_TN, PRODUCT, PRECISION)
        index = (row * chunks + chunk) * heads + head
        tl.store(states_BCHPN + index * P * N + at_PN, state_PN, mask=there_PN)
        whole = tl.load(whole_BHC + (row * heads + head) * chunks + chunk)
        kept_PN = tl.where(whole == 0.0, 0.0, whole * state_PN)
        if REVERSED:
            before_PN = tl.load(before_BCHPN + index * P * N + at_PN, mask=there_PN, other=0.0)
            worth_PN = tl.where(kept_PN == 0.0, 0.0, kept_PN * before_PN.to(tl.float32))
            tl.store(through_BCHK + index * tl.num_programs(0) + tl.program_id(0), tl.sum(worth_PN))
        state_PN = kept_PN + added_PN
    tl.store(end_BHPN + (row * heads + head) * P * N + at_PN, state_PN, mask=there_PN)


@triton.jit
def outputs(
    x_BLHP: tl.tensor, B_BLGN: tl.tensor, C_BLGN: tl.tensor, scores_BGLT: tl.tensor, D_H: tl.tensor,
    itself_BHL: tl.tensor, delta_BHL: tl.tensor, high_BHL: tl.tensor, low_BHL: tl.tensor, enter_BHL: tl.tensor,
    documents_BL: tl.tensor, before_BCHPN: tl.tensor, y_BLHP: tl.tensor, x_row: int, x_token: int, B_row: int,
    B_token: int, C_row: int, C_token: int, y_row: int, y_token: int, length: int, heads: int, groups: int,
    DOCUMENTS: tl.constexpr, ITSELF: tl.constexpr, SCORES: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store y for OWN tokens and one head. Grid: (parts with OWN tokens each, heads, rows).

    The first loop accumulates h C_o over slices of N. The second goes through the chunk's tokens t up to the own ones,
    OWN at a time; with SCORES, it loads C_o . B_t.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0) // (CHUNK // OWN)
    group = head // (heads // groups)
    first_O, start_T = tl.program_id(0) * OWN, chunk * CHUNK
    token_O = first_O + tl.arange(0, OWN)
    at, chunks = (row * heads + head) * length, tl.cdiv(length, CHUNK)
    p_P = tl.arange(0, BLOCK_P)
    x_LP = x_BLHP + row * x_row + head * P
    B_LN = B_BLGN + row * B_row + group * N
    C_LN = C_BLGN + row * C_row + group * N
    scores_LT = scores_BGLT + ((row * groups + group) * chunks * CHUNK + first_O) * CHUNK
    y_OP = tl.zeros([OWN, BLOCK_P], tl.float32)
    for start in range(0, BLOCK_N, SLICE):
        n_N = start + tl.arange(0, SLICE)
        C_ON = strided_tokens(C_LN, C_token, first_O, OWN, n_N, length, N)
        before_PN = state_entries(before_BCHPN, (row * chunks + chunk) * heads + head, p_P, n_N, P, N)
        y_OP += product(C_ON, tl.trans(before_PN), PRODUCT, PRECISION)
    enter_O1 = tl.load(enter_BHL + at + token_O, mask=token_O < length, other=0.0)[:, None]
    y_OP = tl.where(enter_O1 == 0.0, 0.0, enter_O1 * y_OP)
    skip_O = tl.load(D_H + head) + tl.zeros([OWN], tl.float32)
    for first_T in range(start_T, first_O + 1, OWN):
        token_T = first_T + tl.arange(0, OWN)
        mix_OT = block_scores(
            scores_LT + (first_T - start_T), C_LN, B_LN, C_token, B_token, first_O, first_T, length, SCORES, CHUNK, N,
            OWN, BLOCK_N, SLICE, PRODUCT, PRECISION,
        )  # fmt: skip
        if ITSELF:
            mix_OT, scores_O = apart(mix_OT, token_O, token_T)
            skip_O += scores_O * tl.load(itself_BHL + at + token_O, mask=token_O < length, other=0.0)
        mix_OT *= decay_between(
            high_BHL + at, low_BHL + at, documents_BL + row * length, token_O, token_T, length, DOCUMENTS,
            tl.constexpr(False),
        )  # fmt: skip
        mix_OT *= tl.load(delta_BHL + at + token_T, mask=token_T < length, other=0.0)[None, :]
        x_TP = strided_tokens(x_LP, x_token, first_T, OWN, p_P, length, P)
        y_OP += product(mix_OT, x_TP, PRODUCT, PRECISION)
    x_OP = strided_tokens(x_LP, x_token, first_O, OWN, p_P, length, P).to(tl.float32)
    y_OP += skip_O[:, None] * x_OP
    y_OP_ptr = strided_places(y_BLHP + row * y_row + head * P, y_token, first_O, OWN, p_P)
    tl.store(y_OP_ptr, y_OP, mask=tl.expand_dims(token_O < length, 1) & tl.expand_dims(p_P < P, 0))
