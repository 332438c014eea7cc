"""Triton kernels of the SSD scan, forward: decays, a chunk's own state, the sequence of chunks, outputs.

With S_i the sum of g = delta A over the tokens of the chunk up to i, and v = delta x:

    chunk_states    what a chunk adds to the state:       sum_j exp(S_T - S_j) v_j B_j^T
    pass_states     h after = exp(S_T) h before + added   one chunk after another, each put in the place of the last
    outputs         y_i = sum_{j <= i} exp(S_i - S_j) (C_i . B_j) v_j + exp(S_i) h C_i + D x_i

Where a token sees itself by another step than delta (ITSELF), the sum is over j < i, and D is D + itself_i C_i . B_i.

A difference of two such sums decides how much a token remembers, so a few strong decays must not blur those that come
after them. `decays` therefore adds up in float64, which is one number for a token and a head, and hands a sum on as two
fp32 numbers, high + low. Their differences are right to fp32's last bits whatever the sums are: the high parts differ
exactly where they are near each other, and where they are not, the rounding is relative to the difference.

What the state gives to a token is masked after the product too, as 0 times infinity is no zero. No kernel adds up in
an order that depends on the schedule. Not here: gradients (`ssd_backward`) and who calls these (`ssd`).

Legend: B rows, L tokens, H heads, P head size, G groups, N state size; T tokens of a chunk, O a program's own of them.
Tensors that hold one number per token and head are (B, H, L), states between chunks (B, chunks, H, P, N).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """In float64: in fp32 the logarithm of 1 + exp of a very negative number keeps few digits."""
    exp = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(x < -20.0, exp, tl.log(1.0 + exp)))


@triton.jit
def decays(
    dt_BLH: tl.tensor, dt_bias_H: tl.tensor, A_H: tl.tensor, step_BLH: tl.tensor, own_step_BLH: tl.tensor,
    documents_BL: tl.tensor, itself_BHL: tl.tensor, delta_BHL: tl.tensor, high_BHL: tl.tensor, low_BHL: tl.tensor,
    enter_BHL: tl.tensor, leave_BHL: tl.tensor, whole_BHC: tl.tensor, length: int, heads: int,
    DOCUMENTS: tl.constexpr, GIVEN: tl.constexpr, ITSELF: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Of HEADS heads in a chunk: delta, S in two parts, exp(S_i), exp(S_T - S_i) and exp(S_T).

    The last three are zero where no state may pass: in other documents than the one that the state belongs to. GIVEN
    says that g stands in the place of dt, and that delta is 1; with ITSELF it is `step`, and `itself` is `own_step`.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside_T, heads_there = token_T < length, head_H < heads
    there_TH = inside_T[:, None] & heads_there[None, :]
    at_dt_TH = (row * length + token_T)[:, None] * heads + head_H[None, :]
    delta_TH, g_TH = _steps(dt_BLH + at_dt_TH, dt_bias_H + head_H, A_H + head_H, there_TH, heads_there, GIVEN)
    sum_TH, total_H = tl.cumsum(g_TH, axis=0), tl.sum(g_TH, axis=0)
    high_TH = sum_TH.to(tl.float32)
    # Stored before they are used again: Triton 3.6 fails to order the copies in another layout that it stores from.
    at_TH = (row * heads + head_H)[None, :] * length + token_T[:, None]
    if ITSELF:
        delta_TH = tl.load(step_BLH + at_dt_TH, mask=there_TH, other=0.0).to(tl.float32)
        tl.store(itself_BHL + at_TH, tl.load(own_step_BLH + at_dt_TH, mask=there_TH, other=0.0), mask=there_TH)
    tl.store(delta_BHL + at_TH, delta_TH, mask=there_TH)
    tl.store(high_BHL + at_TH, high_TH, mask=there_TH)
    tl.store(low_BHL + at_TH, (sum_TH - high_TH.to(tl.float64)).to(tl.float32), mask=there_TH)
    left_TH = total_H[None, :] - sum_TH  # pyrefly: ignore[bad-index]
    enter_TH, leave_TH = tl.exp(high_TH), tl.exp(left_TH.to(tl.float32))
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
    GIVEN: tl.constexpr,
) -> tuple:  # fmt: skip
    """delta, and g in float64, of what stands at these places in memory."""
    dt_TH = tl.load(dt_TH, mask=there_TH, other=0.0).to(tl.float32)
    if GIVEN:
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
    """Whose the states before and after a chunk are; what comes into a row belongs to document 0."""
    before = tl.maximum(chunk * CHUNK - 1, 0)
    after = tl.minimum((chunk + 1) * CHUNK, length) - 1
    return tl.load(documents_L + before), tl.load(documents_L + after)


@triton.jit
def product(left: tl.tensor, right: tl.tensor, PRODUCT: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """The matrix product of two tiles in the type of products, summed in fp32."""
    left, right = left.to(PRODUCT), right.to(PRODUCT)  # pyrefly: ignore[bad-argument-type]
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def tokens_by_channel(
    x_BLHP: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, channel_P: tl.tensor, length: int,
    heads: int, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """x of some tokens and one head (T, P), zeros beyond; heads may be groups, and P be N."""
    at_TP = ((row * length + token_T) * heads + head)[:, None] * P + channel_P[None, :]
    return tl.load(
        x_BLHP + at_TP, mask=tl.expand_dims(token_T < length, 1) & tl.expand_dims(channel_P < P, 0), other=0.0
    )


@triton.jit
def state_entries(
    states_BCHPN: tl.tensor, index: tl.tensor, p_P: tl.tensor, n_N: tl.tensor, P: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of the state of one head at one chunk (P, N), zeros beyond."""
    there_PN = tl.expand_dims(p_P < P, 1) & tl.expand_dims(n_N < N, 0)
    return tl.load(states_BCHPN + index * P * N + p_P[:, None] * N + n_N[None, :], mask=there_PN, other=0.0)


@triton.jit
def apart(
    mix_OT: tl.tensor, D: tl.tensor, itself_L: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, length: int,
    ITSELF: tl.constexpr,
) -> tuple:  # fmt: skip
    """With ITSELF, products of own tokens and a chunk's without those of a token with itself, which pass by with D.

    Beside them how much of itself a token sees, and these products.
    """
    skip_O1, scores_O = D, D
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
    """exp(S_o - S_t) where own token o sees t, else 0; reversed: exp(S_t - S_o) where t sees o."""
    inside_O, inside_T = token_O < length, token_T < length
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
    length: int, heads: int, groups: int, STEPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """sum_t weight_t left_t right_t^T: x and B forward, with steps delta; dy and C backward, without."""
    slices: tl.constexpr = BLOCK_N // SLICE
    chunk, head, row = tl.program_id(0), tl.program_id(1) // slices, tl.program_id(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_T, at = token_T < length, (row * heads + head) * length
    weight_T = tl.load(weight_BHL + at + token_T, mask=inside_T, other=0.0)
    if STEPS:
        weight_T *= tl.load(delta_BHL + at + token_T, mask=inside_T, other=0.0)
    p_P, n_N = tl.arange(0, BLOCK_P), tl.program_id(1) % slices * SLICE + tl.arange(0, SLICE)
    left_TP = tokens_by_channel(left_BLHP, row, token_T, head, p_P, length, heads, P)
    right_TN = tokens_by_channel(right_BLGN, row, token_T, head // (heads // groups), n_N, length, groups, N)
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
    """In the place of what every chunk adds, the state that it starts from; and the state after the last one.

    Reversed, these are gradients, from the last chunk to the first: of the state after each chunk, and of the one
    before the row. Then `through` gets, for every chunk and block, what the decay of the whole chunk is worth.
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
    before_BCHPN: tl.tensor, y_BLHP: tl.tensor, length: int, heads: int, groups: int, DOCUMENTS: tl.constexpr,
    ITSELF: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """y of OWN tokens of a chunk, one head."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk, group = tl.program_id(0) // (CHUNK // OWN), head // (heads // groups)
    token_O = tl.program_id(0) * OWN + tl.arange(0, OWN)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    at = (row * heads + head) * length
    index = (row * tl.cdiv(length, CHUNK) + chunk) * heads + head
    p_P = tl.arange(0, BLOCK_P)
    mix_OT = tl.zeros([OWN, CHUNK], tl.float32)
    seen_OP = tl.zeros([OWN, BLOCK_P], tl.float32)
    for start in range(0, BLOCK_N, SLICE):
        n_N = start + tl.arange(0, SLICE)
        C_ON = tokens_by_channel(C_BLGN, row, token_O, group, n_N, length, groups, N)
        B_TN = tokens_by_channel(B_BLGN, row, token_T, group, n_N, length, groups, N)
        mix_OT += product(C_ON, tl.trans(B_TN), PRODUCT, PRECISION)
        before_PN = state_entries(before_BCHPN, index, p_P, n_N, P, N)
        seen_OP += product(C_ON, tl.trans(before_PN), PRODUCT, PRECISION)
    mix_OT, skip_O1, _ = apart(mix_OT, tl.load(D_H + head), itself_BHL + at, token_O, token_T, length, ITSELF)
    mix_OT *= decay_between(
        high_BHL + at, low_BHL + at, documents_BL + row * length, token_O, token_T, length, DOCUMENTS,
        tl.constexpr(False),
    )  # fmt: skip
    mix_OT *= tl.load(delta_BHL + at + token_T, mask=token_T < length, other=0.0)[None, :]
    x_TP = tokens_by_channel(x_BLHP, row, token_T, head, p_P, length, heads, P)
    y_OP = product(mix_OT, x_TP, PRODUCT, PRECISION)
    enter_O1 = tl.load(enter_BHL + at + token_O, mask=token_O < length, other=0.0)[:, None]
    y_OP += tl.where(enter_O1 == 0.0, 0.0, enter_O1 * seen_OP)
    x_OP = tokens_by_channel(x_BLHP, row, token_O, head, p_P, length, heads, P).to(tl.float32)
    y_OP += skip_O1 * x_OP
    at_OP = ((row * length + token_O) * heads + head)[:, None] * P + p_P[None, :]
    tl.store(y_BLHP + at_OP, y_OP, mask=tl.expand_dims(token_O < length, 1) & tl.expand_dims(p_P < P, 0))
