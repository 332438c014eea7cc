"""Triton kernels of the SSD scan, backward: of tokens and decays, of B and C, and the sums that close it.

With E_ij = exp(S_i - S_j) where i sees j, s_ij = C_i . B_j, h the state before a chunk and dh the gradient of the state
after it (both from `ssd_forward`, whose `chunk_states` and `pass_states` run backward too):

    dv_j = sum_i s_ij E_ij dy_i + exp(S_T - S_j) dh B_j,   dx_j = delta_j dv_j + D dy_j
    dC_i = sum_j w_ij B_j + exp(S_i) h^T dy_i,       with w_ij = E_ij dy_i . v_j
    dB_j = sum_i w_ij C_i + exp(S_T - S_j) dh^T v_j
    dg_t = sum_{i >= t > j} s_ij w_ij + sum_{i >= t} exp(S_i) dy_i . h C_i + sum_{j < t} exp(S_T - S_j) v_j . dh B_j
           + exp(S_T) dh . h

Where a token sees itself by another step than delta (ITSELF), its own term is not in dv, and with that step r

    dx_j = delta_j dv_j + (D + r_j s_jj) dy_j,   w_jj = r_j dy_j . x_j,   dr_j = s_jj dy_j . x_j

The first sum of dg is formed over the pairs (i, j) on both sides of t alone. Taking it for a difference of sums over
all pairs would be cheaper, and would leave the rounding of the strongest pairs in every token's gradient.

B and C are shared by the heads of a group: a program goes through some of them and adds up w before the product. Not
here: anything forward. The order of every sum is fixed by the shapes.

Legend: as in `ssd_forward`; S splits of a group's heads, K parts of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.ssd.kernels_forward import apart, decay_between, product, state_entries, tokens_by_channel


@triton.jit
def token_gradients(
    x_BLHP: tl.tensor, dy_BLHP: tl.tensor, B_BLGN: tl.tensor, C_BLGN: tl.tensor, D_H: tl.tensor,
    itself_BHL: tl.tensor, delta_BHL: tl.tensor, high_BHL: tl.tensor, low_BHL: tl.tensor, enter_BHL: tl.tensor,
    leave_BHL: tl.tensor, documents_BL: tl.tensor, before_BCHPN: tl.tensor, grad_after_BCHPN: tl.tensor,
    grad_x_BLHP: tl.tensor, direct_BHL: tl.tensor, skip_BHL: tl.tensor, scores_BHL: tl.tensor, gain_BHL: tl.tensor,
    loss_BHL: tl.tensor, pairs_KBHL: tl.tensor, length: int, heads: int, groups: int, DOCUMENTS: tl.constexpr,
    ITSELF: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute for OWN tokens and a head dx, and by token dv . x, dy . x, s, and dg by states and by pairs."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk, group = tl.program_id(0) // (CHUNK // OWN), head // (heads // groups)
    token_O, token_T = tl.program_id(0) * OWN + tl.arange(0, OWN), chunk * CHUNK + tl.arange(0, CHUNK)
    inside_O, at, p_P = token_O < length, (row * heads + head) * length, tl.arange(0, BLOCK_P)
    index = (row * tl.cdiv(length, CHUNK) + chunk) * heads + head
    mix_OT, kept_OP, seen_OP = _over_states(
        B_BLGN, C_BLGN, before_BCHPN, grad_after_BCHPN, row, index, group, token_O, token_T, p_P, length, groups,
        P, N, CHUNK, OWN, BLOCK_P, BLOCK_N, SLICE, PRODUCT, PRECISION,
    )  # fmt: skip
    mix_OT, skip_O1, scores_O = apart(mix_OT, tl.load(D_H + head), itself_BHL + at, token_O, token_T, length, ITSELF)
    if ITSELF:
        tl.store(scores_BHL + at + token_O, scores_O, mask=inside_O)
    x_OP = tokens_by_channel(x_BLHP, row, token_O, head, p_P, length, heads, P)
    dy_OP = tokens_by_channel(dy_BLHP, row, token_O, head, p_P, length, heads, P).to(tl.float32)
    gain_O1 = _weighted(enter_BHL + at, tl.sum(seen_OP * dy_OP, axis=1)[:, None], token_O, length)
    tl.store((gain_BHL + at + token_O)[:, None], gain_O1, mask=inside_O[:, None])
    tl.store(skip_BHL + at + token_O, tl.sum(dy_OP * x_OP.to(tl.float32), axis=1), mask=inside_O)
    dv_OP, delta_O, pairs_T = _over_pairs(
        mix_OT, x_OP, dy_BLHP, delta_BHL + at, high_BHL + at, low_BHL + at, documents_BL + row * length, row, head,
        token_O, token_T, p_P, length, heads, DOCUMENTS, P, PRODUCT, PRECISION,
    )  # fmt: skip
    part, rows = tl.program_id(0) % (CHUNK // OWN), tl.num_programs(2).to(tl.int64)
    tl.store(pairs_KBHL + part * rows * heads * length + at + token_T, pairs_T, mask=token_T < length)
    kept_OP, x_OP = _weighted(leave_BHL + at, kept_OP, token_O, length), x_OP.to(tl.float32)
    dv_OP += kept_OP
    tl.store(loss_BHL + at + token_O, delta_O * tl.sum(kept_OP * x_OP, axis=1), mask=inside_O)
    tl.store(direct_BHL + at + token_O, tl.sum(dv_OP * x_OP, axis=1), mask=inside_O)
    at_OP = ((row * length + token_O) * heads + head)[:, None] * P + p_P[None, :]
    dx_OP = delta_O[:, None] * dv_OP + skip_O1 * dy_OP
    tl.store(grad_x_BLHP + at_OP, dx_OP, mask=inside_O[:, None] & tl.expand_dims(p_P < P, 0))


@triton.jit
def _weighted(weight_L: tl.tensor, x_OP: tl.tensor, token_O: tl.tensor, length: int) -> tl.tensor:
    """Multiply by a weight of each token; the product is 0 where the weight is 0, whatever x is."""
    weight_O1 = tl.load(weight_L + token_O, mask=token_O < length, other=0.0)[:, None]
    return tl.where(weight_O1 == 0.0, 0.0, weight_O1 * x_OP)


@triton.jit
def _over_pairs(
    mix_OT: tl.tensor, x_OP: tl.tensor, dy_BLHP: tl.tensor, delta_L: tl.tensor, high_L: tl.tensor, low_L: tl.tensor,
    documents_L: tl.tensor, row: tl.tensor, head: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, p_P: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, P: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """From B_o . C_t: dv of own tokens, and their delta; for every t of the chunk, the own tokens' pairs across t."""
    mix_OT *= decay_between(high_L, low_L, documents_L, token_O, token_T, length, DOCUMENTS, tl.constexpr(True))
    dy_TP = tokens_by_channel(dy_BLHP, row, token_T, head, p_P, length, heads, P)
    dv_OP = product(mix_OT, dy_TP, PRODUCT, PRECISION)
    delta_O = tl.load(delta_L + token_O, mask=token_O < length, other=0.0)
    worth_OT = product(x_OP, tl.trans(dy_TP), PRODUCT, PRECISION) * mix_OT * delta_O[:, None]
    later_OT = tl.cumsum(worth_OT, axis=1, reverse=True)  # of the pairs of an own token, those with t or a later one
    return dv_OP, delta_O, tl.sum(tl.where(token_O[:, None] < token_T[None, :], later_OT, 0.0), axis=0)


@triton.jit
def _over_states(
    B_BLGN: tl.tensor, C_BLGN: tl.tensor, before_BCHPN: tl.tensor, grad_after_BCHPN: tl.tensor, row: tl.tensor,
    index: tl.tensor, group: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, p_P: tl.tensor, length: int,
    groups: int, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """B_o . C_t, dh B_o and h C_o of own tokens o, summed over slices of the state's entries."""
    mix_OT = tl.zeros([OWN, CHUNK], tl.float32)
    kept_OP = tl.zeros([OWN, BLOCK_P], tl.float32)
    seen_OP = tl.zeros([OWN, BLOCK_P], tl.float32)
    for start in range(0, BLOCK_N, SLICE):
        n_N = start + tl.arange(0, SLICE)
        B_ON = tokens_by_channel(B_BLGN, row, token_O, group, n_N, length, groups, N)
        C_TN = tokens_by_channel(C_BLGN, row, token_T, group, n_N, length, groups, N)
        mix_OT += product(B_ON, tl.trans(C_TN), PRODUCT, PRECISION)
        grad_after_PN = state_entries(grad_after_BCHPN, index, p_P, n_N, P, N)
        kept_OP += product(B_ON, tl.trans(grad_after_PN), PRODUCT, PRECISION)
        C_ON = tokens_by_channel(C_BLGN, row, token_O, group, n_N, length, groups, N)
        before_PN = state_entries(before_BCHPN, index, p_P, n_N, P, N)
        seen_OP += product(C_ON, tl.trans(before_PN), PRODUCT, PRECISION)
    return mix_OT, kept_OP, seen_OP


@triton.jit
def group_gradients(
    own_BLHP: tl.tensor, other_BLHP: tl.tensor, shared_BLGN: tl.tensor, itself_BHL: tl.tensor, delta_BHL: tl.tensor,
    high_BHL: tl.tensor, low_BHL: tl.tensor, weight_BHL: tl.tensor, documents_BL: tl.tensor, states_BCHPN: tl.tensor,
    grad_BLSGN: tl.tensor, length: int, heads: int, groups: int, splits: int, DOCUMENTS: tl.constexpr,
    ITSELF: tl.constexpr, REVERSED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A split's share of dC at OWN tokens (own dy, other x, shared B, h); reversed, of dB (own x, other dy, C, dh)."""
    slices: tl.constexpr = BLOCK_N // SLICE
    group, split = tl.program_id(1) // slices // splits, tl.program_id(1) // slices % splits
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0) // (CHUNK // OWN)
    token_O, token_T = tl.program_id(0) * OWN + tl.arange(0, OWN), chunk * CHUNK + tl.arange(0, CHUNK)
    of_group, each = heads // groups, tl.cdiv(heads // groups, splits)
    p_P, n_N = tl.arange(0, BLOCK_P), tl.program_id(1) % slices * SLICE + tl.arange(0, SLICE)
    worth_OT, grad_ON = tl.zeros([OWN, CHUNK], tl.float32), tl.zeros([OWN, SLICE], tl.float32)
    first = group * of_group + split * each
    for head in range(first, tl.minimum(first + each, (group + 1) * of_group)):
        at = (row * heads + head) * length
        own_OP = tokens_by_channel(own_BLHP, row, token_O, head, p_P, length, heads, P)
        other_TP = tokens_by_channel(other_BLHP, row, token_T, head, p_P, length, heads, P)
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
        delta_L, itself_L = delta_BHL + at, itself_BHL + at
        worth_OT += pair_OT * _steps_of_pairs(delta_L, itself_L, token_O, token_T, length, ITSELF, REVERSED)
    shared_TN = tokens_by_channel(shared_BLGN, row, token_T, group, n_N, length, groups, N)
    grad_ON += product(worth_OT, shared_TN, PRODUCT, PRECISION)
    at_ON = (((row * length + token_O) * splits + split) * groups + group)[:, None] * N + n_N[None, :]
    tl.store(grad_BLSGN + at_ON, grad_ON, mask=tl.expand_dims(token_O < length, 1) & tl.expand_dims(n_N < N, 0))


@triton.jit
def _steps_of_pairs(
    delta_L: tl.tensor, itself_L: tl.tensor, token_O: tl.tensor, token_T: tl.tensor, length: int,
    ITSELF: tl.constexpr, REVERSED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The step by which t is seen of own token o, reversed o of t; with ITSELF another where o is t."""
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
    through_BCH: tl.tensor, grad_dt_BLH: tl.tensor, grad_step_BLH: tl.tensor, grad_own_step_BLH: tl.tensor,
    grads_3BCH: tl.tensor, length: int, heads: int, PARTS: tl.constexpr, GIVEN: tl.constexpr, ITSELF: tl.constexpr,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Of HEADS heads in a chunk: dg, from it the gradient of dt, and the chunk's share of those of A, D and dt_bias.

    GIVEN says that g stands in the place of dt, of which dg is the gradient; with ITSELF there are those of both steps.
    """
    chunk, row, rows = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(2).to(tl.int64)
    token_T, head_H = chunk * CHUNK + tl.arange(0, CHUNK), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    heads_there = head_H < heads
    there_TH = tl.expand_dims(token_T < length, 1) & heads_there[None, :]
    at_TH = (row * heads + head_H)[None, :] * length + token_T[:, None]
    at_border_H = (row * tl.num_programs(0) + chunk) * heads + head_H

    through_H = tl.load(through_BCH + at_border_H, mask=heads_there, other=0.0)
    grad_g_TH = _decay_gradients(
        gain_BHL + at_TH, loss_BHL + at_TH, pairs_KBHL + at_TH, through_H, there_TH, rows * heads * length, PARTS
    )
    at_dt_TH = (row * length + token_T)[:, None] * heads + head_H[None, :]
    share = rows * tl.num_programs(0) * heads
    skip_TH = tl.load(skip_BHL + at_TH, mask=there_TH, other=0.0)
    tl.store(grads_3BCH + share + at_border_H, tl.sum(skip_TH, axis=0), mask=heads_there)
    direct_TH = tl.load(direct_BHL + at_TH, mask=there_TH, other=0.0)
    if ITSELF:
        tl.store(grad_step_BLH + at_dt_TH, direct_TH, mask=there_TH)
        of_own_TH = tl.load(scores_BHL + at_TH, mask=there_TH, other=0.0) * skip_TH
        tl.store(grad_own_step_BLH + at_dt_TH, of_own_TH, mask=there_TH)
    if GIVEN:
        tl.store(grad_dt_BLH + at_dt_TH, grad_g_TH, mask=there_TH)
    else:
        delta_TH = tl.load(delta_BHL + at_TH, mask=there_TH, other=0.0)
        grad_delta_TH = direct_TH + grad_g_TH * tl.load(A_H + head_H, mask=heads_there, other=0.0)[None, :]
        grad_dt_TH = grad_delta_TH * _slopes(dt_BLH + at_dt_TH, dt_bias_H + head_H, there_TH, heads_there)
        tl.store(grad_dt_BLH + at_dt_TH, grad_dt_TH, mask=there_TH)
        tl.store(grads_3BCH + at_border_H, tl.sum(grad_g_TH * delta_TH, axis=0), mask=heads_there)
        tl.store(grads_3BCH + 2 * share + at_border_H, tl.sum(grad_dt_TH, axis=0), mask=heads_there)


@triton.jit
def _slopes(dt_TH: tl.tensor, dt_bias_H: tl.tensor, there_TH: tl.tensor, heads_there: tl.tensor) -> tl.tensor:
    """Compute the slopes of softplus at dt + dt_bias, which are read from these places in memory."""
    dt_TH = tl.load(dt_TH, mask=there_TH, other=0.0).to(tl.float32)
    bias_H = tl.load(dt_bias_H, mask=heads_there, other=0.0)
    return tl.where(there_TH, tl.sigmoid(dt_TH + bias_H[None, :]), 0.0)


@triton.jit
def _decay_gradients(
    gain_TH: tl.tensor, loss_TH: tl.tensor, pairs_TH: tl.tensor, through_H: tl.tensor, there_TH: tl.tensor, apart: int,
    PARTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """dg from its terms, at their places in memory; those of pairs lie in as many parts, so far apart."""
    gain_TH = tl.load(gain_TH, mask=there_TH, other=0.0).to(tl.float64)
    loss_TH = tl.load(loss_TH, mask=there_TH, other=0.0).to(tl.float64)
    grad_g_TH = tl.cumsum(gain_TH, axis=0, reverse=True) + (tl.cumsum(loss_TH, axis=0) - loss_TH)
    grad_g_TH += through_H.to(tl.float64)[None, :]
    for part in range(PARTS):
        grad_g_TH += tl.load(pairs_TH + part * apart, mask=there_TH, other=0.0).to(tl.float64)
    return grad_g_TH.to(tl.float32)
