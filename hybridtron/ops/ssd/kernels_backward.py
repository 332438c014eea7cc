"""Triton kernels for the backward pass of the SSD scan.

The scan is h_t = exp(g_t) h_{t-1} + v_t B_t^T, y_t = h_t C_t + D x_t, with g = delta A and v = delta x. It is computed
in chunks of tokens. S_i is g summed over the chunk's tokens up to i, and S_T is g summed over the full chunk. E_ij is
exp(S_i - S_j) if token i sees token j, else 0. s_ij is C_i . B_j. h is the state before a chunk, and dh is the gradient
of the state after it. `walk` in `kernels_forward` computes both h and dh. Then the kernels in this file run;
`sum_of_splits` runs only if a group's heads are divided among several programs:

    token_gradients   dx, and the terms for dg and for the steps' gradients
    group_gradients   dC and dB, or their partial sums
    sum_of_splits     dC and dB, from the partial sums
    step_gradients    the gradients of dt and the parameters A, D and dt_bias, from the terms

In these equations, d before any other name than h denotes a gradient:

    dv_j = sum_i s_ij E_ij dy_i + exp(S_T - S_j) dh B_j,   dx_j = delta_j dv_j + D dy_j
    dC_i = sum_j w_ij B_j + exp(S_i) h^T dy_i,       with w_ij = E_ij dy_i . v_j
    dB_j = sum_i w_ij C_i + exp(S_T - S_j) dh^T v_j
    dg_t = sum_{i >= t > j} s_ij w_ij + sum_{i >= t} exp(S_i) dy_i . h C_i + sum_{j < t} exp(S_T - S_j) v_j . dh B_j
           + exp(S_T) dh . h

With the flag ITSELF, later tokens see token j with the factor delta_j, but token j sees itself with another factor r_j
(`itself` in the code). Then the sum in dv_j is over i > j, and three gradients change:

    dx_j = delta_j dv_j + (D + r_j s_jj) dy_j,   w_jj = r_j dy_j . x_j,   dr_j = s_jj dy_j . x_j

The first sum in dg_t covers the pairs (i, j) on both sides of t. A difference between two sums over more pairs would be
cheaper. But it would leave the rounding errors of the largest terms in every token's gradient. With bf16 inputs, the
terms of this first sum are rounded to bf16 before they are added by a product with a mask; the sum itself is fp32.

A group's heads share B and C, so dB and dC are sums over the heads. A program loops over several heads, and adds
their w before it multiplies by B or C. No kernel uses atomics, so results are deterministic.

Legend: B rows (sequences in a batch), L tokens, H heads, P head size, G head groups that share B and C, N state
size, C chunks (in state shapes), T tokens in a chunk, O tokens in the chunk that a program computes (its own
tokens), S splits (programs among which a group's heads are divided), K parts with OWN tokens in a chunk. Tensors with
one number per token and head are (B, H, L).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.ssd.kernels_forward import (
    add_exactly,
    apart,
    block_scores,
    decay_between,
    product,
    state_entries,
    strided_places,
    strided_tokens,
)


@triton.jit
def token_gradients(
    x_BLHP: tl.tensor, dy_BLHP: tl.tensor, B_BLGN: tl.tensor, C_BLGN: tl.tensor, scores_BGLT: tl.tensor,
    D_H: tl.tensor, itself_BHL: tl.tensor, delta_BHL: tl.tensor, high_BHL: tl.tensor, low_BHL: tl.tensor,
    enter_BHL: tl.tensor, leave_BHL: tl.tensor, documents_BL: tl.tensor, before_BCHPN: tl.tensor,
    grad_after_BCHPN: tl.tensor, grad_x_BLHP: tl.tensor, direct_BHL: tl.tensor, skip_BHL: tl.tensor,
    scores_BHL: tl.tensor, gain_BHL: tl.tensor, loss_BHL: tl.tensor, pairs_KBHL: tl.tensor, x_row: int, x_token: int,
    dy_row: int, dy_token: int, B_row: int, B_token: int, C_row: int, C_token: int, grad_x_row: int, grad_x_token: int,
    length: int, heads: int, groups: int, DOCUMENTS: tl.constexpr, ITSELF: tl.constexpr, SCORES: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx for OWN tokens and a head, and the terms from which `step_gradients` computes its results.

    `TokenTerms` in `kernels` lists them. Grid: (parts with OWN tokens, heads, rows). With SCORES, B_o . C_t is loaded.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk, part = tl.program_id(0) // (CHUNK // OWN), tl.program_id(0) % (CHUNK // OWN)
    group = head // (heads // groups)
    first_O, own_O = tl.program_id(0) * OWN, tl.arange(0, OWN)
    token_O = first_O + own_O
    inside_O = token_O < length
    at, chunks, p_P = (row * heads + head) * length, tl.cdiv(length, CHUNK), tl.arange(0, BLOCK_P)
    dy_LP = dy_BLHP + row * dy_row + head * P
    B_LN, C_LN = B_BLGN + row * B_row + group * N, C_BLGN + row * C_row + group * N
    index = (row * chunks + chunk) * heads + head
    x_OP = strided_tokens(x_BLHP + row * x_row + head * P, x_token, first_O, OWN, p_P, length, P)
    dy_OP = strided_tokens(dy_LP, dy_token, first_O, OWN, p_P, length, P)
    seen_OP = _over_states(
        C_LN, C_token, before_BCHPN, index, first_O, p_P, length, P, N, OWN, BLOCK_P, BLOCK_N, SLICE, PRODUCT,
        PRECISION,
    )  # fmt: skip
    gain_O1 = _weighted(enter_BHL + at, tl.sum(seen_OP * dy_OP.to(tl.float32), axis=1)[:, None], token_O, length)
    tl.store((gain_BHL + at + token_O)[:, None], gain_O1, mask=inside_O[:, None])
    dv_OP = _over_states(
        B_LN, B_token, grad_after_BCHPN, index, first_O, p_P, length, P, N, OWN, BLOCK_P, BLOCK_N, SLICE, PRODUCT,
        PRECISION,
    )  # fmt: skip
    dv_OP = _weighted(leave_BHL + at, dv_OP, token_O, length)
    delta_O = tl.load(delta_BHL + at + token_O, mask=inside_O, other=0.0)
    kept_O = tl.sum(dv_OP * x_OP.to(tl.float32), axis=1)
    tl.store(loss_BHL + at + token_O, delta_O * kept_O, mask=inside_O)
    scores_LT = scores_BGLT + ((row * groups + group) * chunks * CHUNK + first_O) * CHUNK
    pairs_L = pairs_KBHL + part * tl.num_programs(2).to(tl.int64) * heads * length + at
    first_O, dv_OP, worth_O, along_O, scores_O = _over_pairs(
        dv_OP, x_OP, delta_O, scores_LT, B_LN, C_LN, B_token, C_token, dy_LP, dy_token, high_BHL + at, low_BHL + at,
        documents_BL + row * length, pairs_L, first_O, chunk * CHUNK, p_P, length, DOCUMENTS, ITSELF, SCORES, P, N,
        CHUNK, OWN, BLOCK_N, SLICE, PRODUCT, PRECISION,
    )  # fmt: skip
    token_O = first_O + own_O
    inside_O = token_O < length
    skip_O = tl.load(D_H + head) + tl.zeros([OWN], tl.float32)
    if ITSELF:
        tl.store(scores_BHL + at + token_O, scores_O, mask=inside_O)
        skip_O += scores_O * tl.load(itself_BHL + at + token_O, mask=inside_O, other=0.0)
    tl.store(direct_BHL + at + token_O, kept_O + worth_O, mask=inside_O)
    tl.store(skip_BHL + at + token_O, along_O, mask=inside_O)
    dy_OP = strided_tokens(dy_LP, dy_token, first_O, OWN, p_P, length, P)
    grad_x_OP = strided_places(grad_x_BLHP + row * grad_x_row + head * P, grad_x_token, first_O, OWN, p_P)
    dx_OP = delta_O[:, None] * dv_OP + skip_O[:, None] * dy_OP.to(tl.float32)
    tl.store(grad_x_OP, dx_OP, mask=inside_O[:, None] & tl.expand_dims(p_P < P, 0))


@triton.jit
def _over_pairs(
    dv_OP: tl.tensor, x_OP: tl.tensor, delta_O: tl.tensor, scores_LT: tl.tensor, B_LN: tl.tensor, C_LN: tl.tensor,
    B_token: int, C_token: int, dy_LP: tl.tensor, dy_token: int, high_L: tl.tensor, low_L: tl.tensor,
    documents_L: tl.tensor, pairs_L: tl.tensor, first_O: tl.tensor, start_T: tl.tensor, p_P: tl.tensor, length: int,
    DOCUMENTS: tl.constexpr, ITSELF: tl.constexpr, SCORES: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, OWN: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """Go through a chunk's tokens t, OWN at a time, from the last down to the program's own tokens, and store `pairs`.

    Return the first own token; dv with the pairs' terms added; the sum of x_o . dy_t E_to s_to over t; dy_o . x_o; and
    s_oo, with ITSELF. The last block of the loop begins at the first own token: addresses that are computed from the
    returned value need no registers during the loop. A product with a mask sums over later tokens; a cumulative sum
    would take 400 shuffles.
    """
    own_O = tl.arange(0, OWN)
    token_O = first_O + own_O
    worth_O = tl.zeros([OWN], tl.float32)
    along_O = tl.zeros([OWN], tl.float32)
    scores_O = tl.zeros([OWN], tl.float32)
    up_to_TT = tl.where(own_O[:, None] >= own_O[None, :], 1.0, 0.0)
    first_T = start_T + CHUNK
    for _ in range((first_T - first_O) // OWN):
        first_T -= OWN
        token_T = first_T + own_O
        mix_OT = block_scores(
            scores_LT + (first_T - start_T), B_LN, C_LN, B_token, C_token, first_O, first_T, length, SCORES, CHUNK, N,
            OWN, BLOCK_N, SLICE, PRODUCT, PRECISION,
        )  # fmt: skip
        if ITSELF:
            mix_OT, own_scores_O = apart(mix_OT, token_O, token_T)
            scores_O += own_scores_O
        mix_OT *= decay_between(high_L, low_L, documents_L, token_O, token_T, length, DOCUMENTS, tl.constexpr(True))
        dy_TP = strided_tokens(dy_LP, dy_token, first_T, OWN, p_P, length, P)
        dv_OP += product(mix_OT, dy_TP, PRODUCT, PRECISION)
        worth_OT = product(x_OP, tl.trans(dy_TP), PRODUCT, PRECISION)
        along_O += tl.sum(tl.where(token_O[:, None] == token_T[None, :], worth_OT, 0.0), axis=1)
        worth_OT *= mix_OT
        later_OT = delta_O[:, None] * (product(worth_OT, up_to_TT, PRODUCT, PRECISION) + worth_O[:, None])
        pairs_T = tl.sum(tl.where(token_O[:, None] < token_T[None, :], later_OT, 0.0), axis=0)
        tl.store(pairs_L + token_T, pairs_T, mask=token_T < length)
        worth_O += tl.sum(worth_OT, axis=1)
    return first_T, dv_OP, worth_O, along_O, scores_O


@triton.jit
def _weighted(weight_L: tl.tensor, x_OP: tl.tensor, token_O: tl.tensor, length: int) -> tl.tensor:
    """Return x times a weight for each token; the result is 0 where the weight is 0, even if x is infinite or NaN."""
    weight_O1 = tl.load(weight_L + token_O, mask=token_O < length, other=0.0)[:, None]
    return tl.where(weight_O1 == 0.0, 0.0, weight_O1 * x_OP)


@triton.jit
def _over_states(
    left_LN: tl.tensor, left_token: int, states_BCHPN: tl.tensor, index: tl.tensor, first_O: tl.tensor, p_P: tl.tensor,
    length: int, P: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the product of a state with B_o or C_o (`left`) for OWN tokens o, accumulated over slices of N."""
    sum_OP = tl.zeros([OWN, BLOCK_P], tl.float32)
    for start in range(0, BLOCK_N, SLICE):
        n_N = start + tl.arange(0, SLICE)
        left_ON = strided_tokens(left_LN, left_token, first_O, OWN, n_N, length, N)
        state_PN = state_entries(states_BCHPN, index, p_P, n_N, P, N)
        sum_OP += product(left_ON, tl.trans(state_PN), PRODUCT, PRECISION)
    return sum_OP


@triton.jit
def group_gradients(
    own_BLHP: tl.tensor, other_BLHP: tl.tensor, shared_BLGN: tl.tensor, itself_BHL: tl.tensor, delta_BHL: tl.tensor,
    high_BHL: tl.tensor, low_BHL: tl.tensor, weight_BHL: tl.tensor, documents_BL: tl.tensor, states_BCHPN: tl.tensor,
    grad_BLSGN: tl.tensor, own_row: int, own_token: int, other_row: int, other_token: int, shared_row: int,
    shared_token: int, grad_row: int, grad_token: int, length: int, heads: int, groups: int, splits: int,
    DOCUMENTS: tl.constexpr, ITSELF: tl.constexpr, REVERSED: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dC's partial sum over one split at OWN tokens; with REVERSED, store dB's partial sum.

    A split is some of a group's heads. For dC, the input `own` is dy, `other` is x, `shared` is B, `states` holds h for
    every chunk, and `weight` is exp(S_i). For dB, `own` is x, `other` is dy, `shared` is C, `states` holds dh for every
    chunk, and `weight` is exp(S_T - S_j). Grid: (parts with OWN tokens each, groups * splits * slices of N, rows).
    """
    slices: tl.constexpr = BLOCK_N // SLICE
    group, split = tl.program_id(1) // slices // splits, tl.program_id(1) // slices % splits
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0) // (CHUNK // OWN)
    first_O, first_T = tl.program_id(0) * OWN, chunk * CHUNK
    token_O = first_O + tl.arange(0, OWN)
    token_T = first_T + tl.arange(0, CHUNK)
    of_group = heads // groups
    per_split = tl.cdiv(heads // groups, splits)
    p_P = tl.arange(0, BLOCK_P)
    n_N = tl.program_id(1) % slices * SLICE + tl.arange(0, SLICE)
    worth_OT = tl.zeros([OWN, CHUNK], tl.float32)
    grad_ON = tl.zeros([OWN, SLICE], tl.float32)
    first = group * of_group + split * per_split
    for head in range(first, tl.minimum(first + per_split, (group + 1) * of_group)):
        at = (row * heads + head) * length
        own_LP = own_BLHP + row * own_row + head * P
        other_LP = other_BLHP + row * other_row + head * P
        own_OP = strided_tokens(own_LP, own_token, first_O, OWN, p_P, length, P)
        other_TP = strided_tokens(other_LP, other_token, first_T, CHUNK, p_P, length, P)
        weight_O = tl.load(weight_BHL + at + token_O, mask=token_O < length, other=0.0)
        if REVERSED:
            weight_O *= tl.load(delta_BHL + at + token_O, mask=token_O < length, other=0.0)
        state_PN = state_entries(states_BCHPN, (row * tl.cdiv(length, CHUNK) + chunk) * heads + head, p_P, n_N, P, N)
        seen_ON = product(own_OP, state_PN, PRODUCT, PRECISION)
        grad_ON += tl.where(weight_O[:, None] == 0.0, 0.0, weight_O[:, None] * seen_ON)
        pair_OT = product(own_OP, tl.trans(other_TP), PRODUCT, PRECISION)
        pair_OT *= decay_between(
            high_BHL + at, low_BHL + at, documents_BL + row * length, token_O, token_T, length, DOCUMENTS, REVERSED
        )
        delta_L = delta_BHL + at
        itself_L = itself_BHL + at
        worth_OT += pair_OT * _steps_of_pairs(delta_L, itself_L, token_O, token_T, length, ITSELF, REVERSED)
    shared_LN = shared_BLGN + row * shared_row + group * N
    shared_TN = strided_tokens(shared_LN, shared_token, first_T, CHUNK, n_N, length, N)
    grad_ON += product(worth_OT, shared_TN, PRODUCT, PRECISION)
    grad_LN = grad_BLSGN + row * grad_row + (split * groups + group) * N
    at_ON = strided_places(grad_LN, grad_token, first_O, OWN, n_N)
    tl.store(at_ON, grad_ON, mask=tl.expand_dims(token_O < length, 1) & tl.expand_dims(n_N < N, 0))


@triton.jit
def sum_of_splits(
    sums_KBLSZ: tl.tensor, grad_BLKZ: tl.tensor, grad_row: int, grad_token: int, length: int, rows: int, size: int,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store dB and dC (the sums of the splits' parts) for TOKENS tokens and BLOCK entries of the axis Z.

    Axis Z has all groups' states; its size is `size`. Axis K has dB, then dC. Grid: (blocks of tokens, blocks of Z,
    2 * rows). On the grid's last axis, the rows for dB precede the rows for dC.
    """
    kind, row = tl.program_id(2) // rows, (tl.program_id(2) % rows).to(tl.int64)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    z_Z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_TZ = tl.expand_dims(token_T < length, 1) & tl.expand_dims(z_Z < size, 0)
    at_TZ = ((kind * rows + row) * length + token_T)[:, None] * (SPLITS * size) + z_Z[None, :]
    grad_TZ = tl.zeros([TOKENS, BLOCK], tl.float32)
    for split in range(SPLITS):
        grad_TZ += tl.load(sums_KBLSZ + at_TZ + split * size, mask=there_TZ, other=0.0)
    grad_LZ = grad_BLKZ + row * grad_row + kind * size
    tl.store(strided_places(grad_LZ, grad_token, tl.program_id(0) * TOKENS, TOKENS, z_Z), grad_TZ, mask=there_TZ)


@triton.jit
def _steps_of_pairs(
    delta_L: tl.tensor, itself_L: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, length: int,
    ITSELF: tl.constexpr, REVERSED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """For each own token o and token t, return the factor with which o sees t; with REVERSED, with which t sees o.

    The factor is delta of the token that is seen. With ITSELF, the factor is `itself` where o = t.
    """
    if REVERSED:
        step_OT = tl.load(delta_L + token_O, mask=token_O < length, other=0.0)[:, None]
    else:
        step_OT = tl.load(delta_L + token_T, mask=token_T < length, other=0.0)[None, :]
    if ITSELF:
        itself_O = tl.load(itself_L + token_O, mask=token_O < length, other=0.0)
        step_OT = tl.where(token_O[:, None] == token_T[None, :], itself_O[:, None], step_OT)
    return step_OT


@triton.jit
def step_gradients(
    dt_BLH: tl.tensor, dt_bias_H: tl.tensor, A_H: tl.tensor, delta_BHL: tl.tensor, direct_BHL: tl.tensor,
    skip_BHL: tl.tensor, scores_BHL: tl.tensor, gain_BHL: tl.tensor, loss_BHL: tl.tensor, pairs_KBHL: tl.tensor,
    through_BCHK: tl.tensor, grad_dt_BLH: tl.tensor, grad_step_BLH: tl.tensor, grad_own_step_BLH: tl.tensor,
    grads_3BCH: tl.tensor, dt_row: int, dt_token: int, grad_dt_row: int, grad_dt_token: int, length: int, heads: int,
    blocks: int, PARTS: tl.constexpr, LOG_DECAYS: tl.constexpr, ITSELF: tl.constexpr, CHUNK: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradient of dt for HEADS heads in a chunk, and the chunk's terms in the gradients of A, D and dt_bias.

    Inputs are the outputs of `token_gradients`, and `through`, which holds exp(S_T) dh . h as `blocks` partial sums (at
    most BLOCKS). With LOG_DECAYS, dt holds g, so the gradient of dt is dg, and no gradients of A and dt_bias are
    stored. With ITSELF, the gradients of `step` and `own_step` are stored too. Grid: (chunks, head blocks, rows).
    """
    chunk, row, rows = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(2).to(tl.int64)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    heads_there = head_H < heads
    there_TH = tl.expand_dims(token_T < length, 1) & heads_there[None, :]
    at_TH = (row * heads + head_H)[None, :] * length + token_T[:, None]
    at_border_H = (row * tl.num_programs(0) + chunk) * heads + head_H

    block_K = tl.arange(0, BLOCKS)
    at_block_HK = at_border_H[:, None] * blocks + block_K[None, :]
    blocks_there = heads_there[:, None] & tl.expand_dims(block_K < blocks, 0)
    through_H = tl.sum(tl.load(through_BCHK + at_block_HK, mask=blocks_there, other=0.0), axis=1)
    grad_g_TH = _decay_gradients(
        gain_BHL + at_TH,
        loss_BHL + at_TH,
        pairs_KBHL + at_TH,
        through_H,
        there_TH,
        rows * heads * length,
        PARTS,
        CHUNK,
    )
    at_dt_TH = row * dt_row + token_T.to(tl.int64)[:, None] * dt_token + head_H[None, :]
    at_grad_TH = row * grad_dt_row + token_T.to(tl.int64)[:, None] * grad_dt_token + head_H[None, :]
    at_step_TH = (row * length + token_T)[:, None] * heads + head_H[None, :]
    share = rows * tl.num_programs(0) * heads
    skip_TH = tl.load(skip_BHL + at_TH, mask=there_TH, other=0.0)
    tl.store(grads_3BCH + share + at_border_H, tl.sum(skip_TH, axis=0), mask=heads_there)
    direct_TH = tl.load(direct_BHL + at_TH, mask=there_TH, other=0.0)
    if ITSELF:
        tl.store(grad_step_BLH + at_step_TH, direct_TH, mask=there_TH)
        of_own_TH = tl.load(scores_BHL + at_TH, mask=there_TH, other=0.0) * skip_TH
        tl.store(grad_own_step_BLH + at_step_TH, of_own_TH, mask=there_TH)
    if LOG_DECAYS:
        tl.store(grad_dt_BLH + at_grad_TH, grad_g_TH, mask=there_TH)
    else:
        delta_TH = tl.load(delta_BHL + at_TH, mask=there_TH, other=0.0)
        grad_delta_TH = direct_TH + grad_g_TH * tl.load(A_H + head_H, mask=heads_there, other=0.0)[None, :]
        grad_dt_TH = grad_delta_TH * _slopes(dt_BLH + at_dt_TH, dt_bias_H + head_H, there_TH, heads_there)
        tl.store(grad_dt_BLH + at_grad_TH, grad_dt_TH, mask=there_TH)
        tl.store(grads_3BCH + at_border_H, tl.sum(grad_g_TH * delta_TH, axis=0), mask=heads_there)
        tl.store(grads_3BCH + 2 * share + at_border_H, tl.sum(grad_dt_TH, axis=0), mask=heads_there)


@triton.jit
def _slopes(dt_TH: tl.tensor, dt_bias_H: tl.tensor, there_TH: tl.tensor, heads_there: tl.tensor) -> tl.tensor:
    """Return the derivative of softplus at dt + dt_bias; the arguments `dt_TH` and `dt_bias_H` are pointers."""
    dt_TH = tl.load(dt_TH, mask=there_TH, other=0.0).to(tl.float32)
    bias_H = tl.load(dt_bias_H, mask=heads_there, other=0.0)
    return tl.where(there_TH, tl.sigmoid(dt_TH + bias_H[None, :]), 0.0)


@triton.jit
def _decay_gradients(
    gain_TH: tl.tensor, loss_TH: tl.tensor, pairs_TH: tl.tensor, through_H: tl.tensor, there_TH: tl.tensor, apart: int,
    PARTS: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return dg_t, the sum of four terms; the arguments `gain_TH`, `loss_TH` and `pairs_TH` are pointers.

    `gain` is summed over tokens from t on, and `loss` is summed over tokens before t. `through` is equal for all
    tokens. `pairs` consists of PARTS partial sums, `apart` elements apart in memory; a part has no sum for tokens
    before its own ones.
    """
    gain_TH = tl.load(gain_TH, mask=there_TH, other=0.0)
    loss_TH = tl.load(loss_TH, mask=there_TH, other=0.0)
    zeros_TH = tl.zeros_like(gain_TH)
    high_TH, low_TH = tl.associative_scan((gain_TH, zeros_TH), 0, add_exactly, reverse=True)
    loss_high_TH, loss_low_TH = tl.associative_scan((loss_TH, zeros_TH), 0, add_exactly)
    loss_high_TH, loss_low_TH = add_exactly(loss_high_TH, loss_low_TH, -loss_TH, zeros_TH)
    high_TH, low_TH = add_exactly(high_TH, low_TH, loss_high_TH, loss_low_TH)
    high_TH, low_TH = add_exactly(high_TH, low_TH, through_H[None, :] + zeros_TH, zeros_TH)
    of_chunk_T = tl.arange(0, CHUNK)
    for part in range(PARTS):
        seen_TH = there_TH & (of_chunk_T >= part * (CHUNK // PARTS))[:, None]
        pairs_part_TH = tl.load(pairs_TH + part * apart, mask=seen_TH, other=0.0)
        high_TH, low_TH = add_exactly(high_TH, low_TH, pairs_part_TH, zeros_TH)
    return high_TH + low_TH
