"""Triton kernels for the forward pass of the SSD scan.

The scan is h_t = exp(g_t) h_{t-1} + v_t B_t^T, y_t = h_t C_t + D x_t, with g = delta A and v = delta x. It is computed
in chunks of tokens. S_i is g summed over the chunk's tokens up to i, S_T is g summed over the full chunk, and h is the
state before the chunk. Four kernels run one after another:

    decays          delta, S and the factors exp(S_i), exp(S_T - S_i), exp(S_T)
    chunk_states    the chunk's addition to the state:         sum_j exp(S_T - S_j) v_j B_j^T
    pass_states     the state after the chunk:                 exp(S_T) h + the chunk's addition
    outputs         y_i = sum_{j <= i} exp(S_i - S_j) (C_i . B_j) v_j + exp(S_i) h C_i + D x_i

The flag ITSELF is for `decay_scan`. With it, later tokens i > j see token j with the factor delta_j, but token j sees
itself with another factor, itself_j. So the sum for y_i is over j < i, and D x_i becomes (D + itself_i C_i . B_i) x_i.

A difference between two sums S decides how much a token remembers. In fp32, a few strong decays would make S large, and
its rounding would hide the small decays after them. `decays` therefore adds in float64, and stores each S as two fp32
numbers, high + low. A difference between two such sums has a relative error near fp32's: if the two high parts are
close, fp32 subtracts them without rounding; if they are not close, the rounding is small relative to the difference.

A token sees h only if it belongs to h's document; else exp(S_i) is replaced by 0. The product exp(S_i) h C_i is then
masked too, since 0 times infinity is NaN. No kernel uses atomics, so results are deterministic. `kernels_backward` has
the backward pass, and `kernels` has the launches.

Legend: B rows (sequences in a batch), L tokens, H heads, P head size, G head groups that share B and C, N state
size, C chunks (in state shapes), T tokens in a chunk, O tokens in the chunk that a program computes (its own
tokens). In `pass_states`: S entries in a block of a state, K blocks. Tensors with one number per token and head are
(B, H, L). States before or after chunks are (B, C, H, P, N).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)) for a float64 tensor; in fp32 a small exp(x) would leave few correct digits."""
    exp = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(x < -20.0, exp, tl.log(1.0 + exp)))


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
    sum_TH = tl.cumsum(g_TH, axis=0)
    total_H = tl.sum(g_TH, axis=0)
    high_TH = sum_TH.to(tl.float32)
    # delta, high and low must be stored before high_TH and sum_TH are used again. After another use, Triton 3.6 may
    # store a copy in another layout, with its elements in the wrong order.
    at_TH = (row * heads + head_H)[None, :] * length + token_T[:, None]
    if ITSELF:
        delta_TH = tl.load(step_BLH + at_step_TH, mask=there_TH, other=0.0).to(tl.float32)
        tl.store(itself_BHL + at_TH, tl.load(own_step_BLH + at_step_TH, mask=there_TH, other=0.0), mask=there_TH)
    tl.store(delta_BHL + at_TH, delta_TH, mask=there_TH)
    tl.store(high_BHL + at_TH, high_TH, mask=there_TH)
    tl.store(low_BHL + at_TH, (sum_TH - high_TH.to(tl.float64)).to(tl.float32), mask=there_TH)
    left_TH = total_H[None, :] - sum_TH  # pyrefly: ignore[bad-index]
    enter_TH = tl.exp(high_TH)
    leave_TH = tl.exp(left_TH.to(tl.float32))
    whole_H = tl.exp(total_H.to(tl.float32))
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
    """Return delta in fp32 and g in float64; the arguments `dt_TH`, `dt_bias_H` and `A_H` are pointers."""
    dt_TH = tl.load(dt_TH, mask=there_TH, other=0.0).to(tl.float32)
    if LOG_DECAYS:
        delta_TH = tl.where(there_TH, 1.0, 0.0)
        g_TH = dt_TH.to(tl.float64)
    else:
        shifted_TH = dt_TH + tl.load(dt_bias_H, mask=heads_there, other=0.0)[None, :]
        delta_TH = tl.where(there_TH, _softplus(shifted_TH.to(tl.float64)), 0.0).to(tl.float32)
        g_TH = delta_TH.to(tl.float64) * tl.load(A_H, mask=heads_there, other=0.0).to(tl.float64)[None, :]
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
    """Return a tile (T, P) of x for the given tokens and one head; entries for tokens or channels out of range are 0.

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
    return x_LP + first.to(tl.int64) * stride + tl.arange(0, T)[:, None] * stride + channel_P[None, :]


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
def apart(
    mix_OT: tl.tensor, D: tl.tensor, itself_L: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, length: int,
    ITSELF: tl.constexpr,
) -> tuple:  # fmt: skip
    """Separate the scores of tokens with themselves (C_o . B_o) from all scores (C_o . B_t); their factors differ.

    With ITSELF, return three tensors: the scores with zeros where o = t; D + itself_o C_o . B_o, which is the factor of
    x_o in y_o; and the scores C_o . B_o. Without ITSELF, return the scores unchanged, D, and D again as a placeholder.
    """
    skip_O1 = D
    scores_O = D
    if ITSELF:
        own_OT = token_O[:, None] == token_T[None, :]
        scores_O = tl.sum(tl.where(own_OT, mix_OT, 0.0), axis=1)
        mix_OT = tl.where(own_OT, 0.0, mix_OT)
        itself_O = tl.load(itself_L + token_O, mask=token_O < length, other=0.0)
        skip_O1 = (itself_O * scores_O + D)[:, None]
    return mix_OT, skip_O1, scores_O


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
def chunk_states(
    left_BLHP: tl.tensor, right_BLGN: tl.tensor, weight_BHL: tl.tensor, delta_BHL: tl.tensor, states_BCHPN: tl.tensor,
    left_row: int, left_token: int, right_row: int, right_token: int, length: int, heads: int, groups: int,
    STEPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store sum_t weight_t left_t right_t^T for each chunk, in `states`.

    In the forward pass, left is x, right is B, and weights are multiplied by delta (STEPS). In the backward pass, left
    is dy, right is C, and STEPS is off. Grid: (chunks, heads * slices of N, rows). A program computes a tile
    (BLOCK_P, SLICE).
    """
    slices: tl.constexpr = BLOCK_N // SLICE
    chunk, head, row = tl.program_id(0), tl.program_id(1) // slices, tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_T = token_T < length
    at = (row * heads + head) * length
    weight_T = tl.load(weight_BHL + at + token_T, mask=inside_T, other=0.0)
    if STEPS:
        weight_T *= tl.load(delta_BHL + at + token_T, mask=inside_T, other=0.0)
    p_P = tl.arange(0, BLOCK_P)
    n_N = tl.program_id(1) % slices * SLICE + tl.arange(0, SLICE)
    left_LP = left_BLHP + row * left_row + head * P
    right_LN = right_BLGN + row * right_row + head // (heads // groups) * N
    left_TP = strided_tokens(left_LP, left_token, chunk * CHUNK, CHUNK, p_P, length, P)
    right_TN = strided_tokens(right_LN, right_token, chunk * CHUNK, CHUNK, n_N, length, N)
    weighted_TP = left_TP.to(tl.float32) * weight_T[:, None]
    added_PN = product(tl.trans(weighted_TP), right_TN, PRODUCT, PRECISION)
    index = (row * tl.num_programs(0) + chunk) * heads + head
    there_PN = tl.expand_dims(p_P < P, 1) & tl.expand_dims(n_N < N, 0)
    tl.store(states_BCHPN + index * P * N + p_P[:, None] * N + n_N[None, :], added_PN, mask=there_PN)


@triton.jit
def pass_states(
    states_BCHPN: tl.tensor, whole_BHC: tl.tensor, start_BHPN: tl.tensor, end_BHPN: tl.tensor,
    before_BCHPN: tl.tensor, through_BCHK: tl.tensor, chunks: int, heads: int, size: int, START: tl.constexpr,
    REVERSED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Replace every chunk's addition in `states` by the state before the chunk; store the state after the row in `end`.

    The state before the row is `start`, or zeros without START. Grid: (blocks of a state, heads, rows).

    With REVERSED, the recurrence runs over state gradients, from the last chunk to the first. On entry, `states` holds
    the chunks' additions to the gradient, and `start` holds the gradient of the state after the row. `states` is
    replaced by dh, the gradient of the state after each chunk, and `end` gets the gradient of the state before the row.
    `before` holds the states h before the chunks. The output `through` gets the sum of exp(S_T) dh h over the block's
    entries.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    value_S = block * BLOCK + tl.arange(0, BLOCK)
    there_S = value_S < size
    at_border = (row * heads + head) * size + value_S
    state_S = tl.zeros([BLOCK], tl.float32)
    if START:
        state_S = tl.load(start_BHPN + at_border, mask=there_S, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSED else step
        index = (row * chunks + chunk) * heads + head
        added_S = tl.load(states_BCHPN + index * size + value_S, mask=there_S, other=0.0)
        tl.store(states_BCHPN + index * size + value_S, state_S, mask=there_S)
        whole = tl.load(whole_BHC + (row * heads + head) * chunks + chunk)
        kept_S = tl.where(whole == 0.0, 0.0, whole * state_S)
        if REVERSED:
            before_S = tl.load(before_BCHPN + index * size + value_S, mask=there_S, other=0.0)
            worth = tl.sum(tl.where(kept_S == 0.0, 0.0, kept_S * before_S), axis=0)
            tl.store(through_BCHK + index * tl.num_programs(0) + block, worth)
        state_S = kept_S + added_S
    tl.store(end_BHPN + at_border, state_S, mask=there_S)


@triton.jit
def outputs(
    x_BLHP: tl.tensor, B_BLGN: tl.tensor, C_BLGN: tl.tensor, D_H: tl.tensor, itself_BHL: tl.tensor,
    delta_BHL: tl.tensor, high_BHL: tl.tensor, low_BHL: tl.tensor, enter_BHL: tl.tensor, documents_BL: tl.tensor,
    before_BCHPN: tl.tensor, y_BLHP: tl.tensor, x_row: int, x_token: int, B_row: int, B_token: int, C_row: int,
    C_token: int, y_row: int, y_token: int, length: int, heads: int, groups: int, DOCUMENTS: tl.constexpr,
    ITSELF: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store y for OWN tokens and one head. Grid: (parts with OWN tokens each, heads, rows).

    The loop over slices of N accumulates C_o . B_t and h C_o.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0) // (CHUNK // OWN)
    group = head // (heads // groups)
    first_O, first_T = tl.program_id(0) * OWN, chunk * CHUNK
    token_O = first_O + tl.arange(0, OWN)
    token_T = first_T + tl.arange(0, CHUNK)
    at = (row * heads + head) * length
    index = (row * tl.cdiv(length, CHUNK) + chunk) * heads + head
    p_P = tl.arange(0, BLOCK_P)
    x_LP = x_BLHP + row * x_row + head * P
    B_LN = B_BLGN + row * B_row + group * N
    C_LN = C_BLGN + row * C_row + group * N
    mix_OT = tl.zeros([OWN, CHUNK], tl.float32)
    seen_OP = tl.zeros([OWN, BLOCK_P], tl.float32)
    for start in range(0, BLOCK_N, SLICE):
        n_N = start + tl.arange(0, SLICE)
        C_ON = strided_tokens(C_LN, C_token, first_O, OWN, n_N, length, N)
        B_TN = strided_tokens(B_LN, B_token, first_T, CHUNK, n_N, length, N)
        mix_OT += product(C_ON, tl.trans(B_TN), PRODUCT, PRECISION)
        before_PN = state_entries(before_BCHPN, index, p_P, n_N, P, N)
        seen_OP += product(C_ON, tl.trans(before_PN), PRODUCT, PRECISION)
    mix_OT, skip_O1, _ = apart(mix_OT, tl.load(D_H + head), itself_BHL + at, token_O, token_T, length, ITSELF)
    mix_OT *= decay_between(
        high_BHL + at, low_BHL + at, documents_BL + row * length, token_O, token_T, length, DOCUMENTS,
        tl.constexpr(False),
    )  # fmt: skip
    mix_OT *= tl.load(delta_BHL + at + token_T, mask=token_T < length, other=0.0)[None, :]
    x_TP = strided_tokens(x_LP, x_token, first_T, CHUNK, p_P, length, P)
    y_OP = product(mix_OT, x_TP, PRODUCT, PRECISION)
    enter_O1 = tl.load(enter_BHL + at + token_O, mask=token_O < length, other=0.0)[:, None]
    y_OP += tl.where(enter_O1 == 0.0, 0.0, enter_O1 * seen_OP)
    x_OP = strided_tokens(x_LP, x_token, first_O, OWN, p_P, length, P).to(tl.float32)
    y_OP += skip_O1 * x_OP
    y_OP_ptr = strided_places(y_BLHP + row * y_row + head * P, y_token, first_O, OWN, p_P)
    tl.store(y_OP_ptr, y_OP, mask=tl.expand_dims(token_O < length, 1) & tl.expand_dims(p_P < P, 0))
