"""Launches of SSD's Triton kernels (`kernels_forward`, `kernels_backward`).

The recurrence is h_t = exp(g_t) h_{t-1} + v_t B_t^T, with g = delta A and v = delta x. A row (a sequence in the batch)
is divided into chunks of tokens. S_T below is g summed over a chunk. Only the inputs are saved. The backward pass
recomputes the decays and the states between chunks; if these were saved too, they would take as much memory as x, or
more. Results are deterministic. An earlier version of the kernels was checked on an H200 (benchmarks/gpu.md). Since
then, most of them have been rewritten, and have run in Triton's interpreter only.

Legend: B rows, L tokens, H heads, P head size, G head groups that share B and C, N state size, C chunks (in state
shapes), S splits (programs among which a group's heads are divided), K parts (of a chunk in `pairs_KBHL`, slices of a
state in `through_BCHK`), T tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, empty_in_order, power_of_2
from hybridtron.ops.ssd import kernels_backward, kernels_forward
from hybridtron.ops.ssd.kernels_row import SSDRow, readable_tokens, strides
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs
from hybridtron.ops.ssd.triton import MAX_HEAD
from hybridtron.ops.sum_kernels import sum_of_parts

# A type checker sees a kernel as a Python function, which can't be launched. `Any` turns this check off.
forward_kernels: Any = kernels_forward
backward_kernels: Any = kernels_backward

HEADS = 8  # heads per program of `decays` and `step_gradients`; their dt are contiguous in memory
SUM_TOKENS = 32  # tokens per program of `sum_of_splits`
SUM_BLOCK = 128  # maximum entries of a token per program of `sum_of_splits`
PROGRAMS = 264  # intended grid size of `group_gradients`: two per multiprocessor of an H100; decides the sums' order


def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return y, and the state after the last token.

    x, B and C are cast to their widest common dtype. dt keeps its dtype, and all other tensors are cast to fp32.
    """
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (x_BLHP, B_BLGN, C_BLGN)))
    x, B, C = (t.to(shared) for t in (x_BLHP, B_BLGN, C_BLGN))
    A, D, dt_bias = (t.float() for t in (A_H, D_H, dt_bias_H))
    state = None if state_BHPN is None else state_BHPN.float()
    y_BLHP, last_BHPN = _TritonSSD.apply(x, dt_BLH, A, B, C, D, dt_bias, state, documents_BL, None, None)
    return y_BLHP.to(x_BLHP.dtype), last_BHPN


def decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    """Return y, and the state after the last token, computed by the kernels for `ssd_scan`.

    The log decays take dt's place. Heads with more than MAX_HEAD channels are divided into several smaller heads.
    """
    slices = ceil_div(inputs.v_BLHP.shape[3], MAX_HEAD)
    y_BLHP, last_BHPN = _decay_scan(inputs if slices == 1 else _sliced(inputs, slices))
    if slices > 1:
        y_BLHP, last_BHPN = (t.unflatten(axis, (-1, slices)) for t, axis in ((y_BLHP, 2), (last_BHPN, 1)))
        y_BLHP = y_BLHP.flatten(3)
        last_BHPN = last_BHPN.flatten(2, 3)
    return y_BLHP, last_BHPN


def _sliced(inputs: DecayInputs, slices: int) -> DecayInputs:
    """Split each head into `slices` heads, by dividing v's channels; the new heads have equal decays, q and k.

    Results do not change, because each channel of v has a separate row in the state.
    """
    v_BLHP = inputs.v_BLHP.unflatten(3, (slices, -1)).flatten(2, 3)
    state_BHPN = inputs.state_BHPN
    state = None if state_BHPN is None else state_BHPN.unflatten(2, (slices, -1)).flatten(1, 2)
    by_head = (inputs.g_BLH, 2), (inputs.step_BLH, 2), (inputs.own_step_BLH, 2), (inputs.D_H, 0)
    g_BLH, step_BLH, own_step_BLH, D_H = (
        None if t is None else t.repeat_interleave(slices, dim=axis) for t, axis in by_head
    )
    assert g_BLH is not None
    return inputs._replace(
        v_BLHP=v_BLHP, g_BLH=g_BLH, state_BHPN=state, step_BLH=step_BLH, own_step_BLH=own_step_BLH, D_H=D_H
    )


def _decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    q_BLGN, k_BLGN, v_BLHP, g_BLH, state_BHPN, documents_BL, *steps, D_H = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q_BLGN, k_BLGN, v_BLHP)))
    v, k, q = (t.to(shared) for t in (v_BLHP, k_BLGN, q_BLGN))
    D = v.new_zeros(v.shape[2], dtype=torch.float32) if D_H is None else D_H.float()
    state = None if state_BHPN is None else state_BHPN.float()
    y_BLHP, last_BHPN = _TritonSSD.apply(v, g_BLH, None, k, q, D, None, state, documents_BL, *steps)
    return y_BLHP.to(v_BLHP.dtype), last_BHPN


class _TritonSSD(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        row = SSDRow(*fields).readable()
        ctx.save_for_backward(*row)
        ctx.set_materialize_grads(False)  # if the last state is not used, its gradient is None
        return forward(row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor | None, grad_last_BHPN: Tensor | None) -> tuple[Tensor | None, ...]:
        row = SSDRow(*ctx.saved_tensors)
        dy_BLHP = torch.zeros_like(row.x_BLHP) if grad_y_BLHP is None else grad_y_BLHP
        grad_last = None if grad_last_BHPN is None else grad_last_BHPN.contiguous()
        return backward(row, readable_tokens(dy_BLHP), grad_last)


def forward(row: SSDRow) -> tuple[Tensor, Tensor]:
    """Return y, and the state after the row."""
    decays = Decays.of(row)
    before_BCHPN, last_BHPN = _states_before(row, decays)
    return _outputs(row, decays, before_BCHPN), last_BHPN


def backward(row: SSDRow, dy_BLHP: Tensor, grad_last_BHPN: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients, ordered like SSDRow's fields; entries are None for missing inputs and for documents.

    `grad_last_BHPN` is the gradient of the state after the row; None counts as zeros.
    """
    decays = Decays.of(row)
    before_BCHPN, _ = _states_before(row, decays)
    after_BCHPN, grad_state_BHPN, through_BCHK = _gradients_after(row, decays, dy_BLHP, before_BCHPN, grad_last_BHPN)
    grad_x_BLHP, terms = _token_gradients(row, decays, dy_BLHP, before_BCHPN, after_BCHPN)
    grad_B, grad_C = _group_gradients(row, decays, dy_BLHP, before_BCHPN, after_BCHPN)
    grad_dt_BLH, of_steps, (grad_A, grad_D, grad_dt_bias) = _step_gradients(row, decays, terms, through_BCHK)
    if row.has_log_decays:
        grad_A = grad_dt_bias = None
    parameters = (grad_A, grad_B, grad_C, grad_D, grad_dt_bias)
    grad_state = None if row.state_BHPN is None else grad_state_BHPN
    return grad_x_BLHP, grad_dt_BLH, *parameters, grad_state, None, *of_steps


class Decays(NamedTuple):
    """All chunks' decays, computed by the kernel `kernels_forward.decays`.

    S_i is g summed over the chunk's tokens up to i.

        itself      a copy of `own_step`; without `own_step`, a valid pointer that no kernel reads
        delta       the step
        high, low   two fp32 numbers whose sum is S_i
        enter       exp(S_i), or 0 if token i is not in the document of the state before the chunk
        leave       exp(S_T - S_i), or 0 if token i is not in the document of the state after the chunk
        whole       exp(S_T), or 0 if these two documents differ
    """

    itself_BHL: Tensor
    delta_BHL: Tensor
    high_BHL: Tensor
    low_BHL: Tensor
    enter_BHL: Tensor
    leave_BHL: Tensor
    whole_BHC: Tensor

    @staticmethod
    def of(row: SSDRow) -> Decays:
        length, heads, _ = row.lengths()
        per_token = [row.per_token() for _ in Decays._fields[1:6]]
        itself_BHL = row.per_token() if row.itself else row.D_H
        whole_BHC = per_token[0].new_empty(row.x_BLHP.shape[0], heads, row.chunks)
        decays = Decays._make((itself_BHL, *per_token, whole_BHC))
        forward_kernels.decays[row.grid(1, ceil_div(heads, HEADS))](
            row.dt_BLH, *row.rates, *row.steps, row.documents, *decays, *strides(row.dt_BLH), length, heads,
            DOCUMENTS=row.documents_BL is not None, LOG_DECAYS=row.has_log_decays, ITSELF=row.itself,
            CHUNK=row.tiles.chunk, HEADS=HEADS,
        )  # fmt: skip
        return decays


class TokenTerms(NamedTuple):
    """Terms from which `step_gradients` computes gradients for steps and decays, a number for each token and head.

    dv, dy and dg are the gradients of v, y and g. `kernels_backward` explains the other names. Only `pairs` has several
    numbers for a token t: one for each part of the chunk with tokens up to t, where o is a token of the part.

        direct   dv_o . x_o
        skip     dy_o . x_o
        scores   s_oo; without `own_step` a valid pointer that no kernel reads
        gain     exp(S_o) dy_o . h C_o, dg's term through the state before the chunk
        loss     exp(S_T - S_o) v_o . dh B_o, dg's term through the state after the chunk
        pairs    s_io w_io summed over the pairs i >= t > o, dg_t's term through pairs of tokens
    """

    direct_BHL: Tensor
    skip_BHL: Tensor
    scores_BHL: Tensor
    gain_BHL: Tensor
    loss_BHL: Tensor
    pairs_KBHL: Tensor

    @staticmethod
    def of(row: SSDRow) -> TokenTerms:
        direct_BHL = row.per_token()
        skip_BHL, gain_BHL, loss_BHL = (row.per_token() for _ in range(3))
        scores_BHL = row.per_token() if row.itself else row.D_H
        pairs_KBHL = direct_BHL.new_empty(row.tiles.chunk // row.tiles.tokens, *direct_BHL.shape)
        return TokenTerms(direct_BHL, skip_BHL, scores_BHL, gain_BHL, loss_BHL, pairs_KBHL)


def _states_before(row: SSDRow, decays: Decays) -> tuple[Tensor, Tensor]:
    """Return the state before every chunk, and the state after the row."""
    states_BCHPN, last_BHPN, _ = _walk(
        row, (row.x_BLHP, row.B_BLGN, decays.leave_BHL), decays, row.state_BHPN, before_BCHPN=None
    )
    return states_BCHPN, last_BHPN


def _walk(
    row: SSDRow,
    factors: tuple[Tensor, Tensor, Tensor],
    decays: Decays,
    start_BHPN: Tensor | None,
    before_BCHPN: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk over a row's chunks: forward, or backward with `before_BCHPN`, the states before chunks.

    Return the tensors that the kernel `walk` stores: the states, the last state, and `through`, which a forward walk
    leaves uninitialized. `factors` are the kernel's `left`, `right` and `weight`.
    """
    left_BLHP, right_BLGN, weight_BHL = factors
    rows, _, heads, head = row.x_BLHP.shape
    state = row.B_BLGN.shape[3]
    states_BCHPN = row.states()
    end_BHPN = weight_BHL.new_empty(rows, heads, head, state)
    entries, slices = row.walk_slices()
    through_BCHK = weight_BHL.new_empty(rows, row.chunks, heads, slices)
    forward_kernels.walk[slices, heads, rows](
        left_BLHP, right_BLGN, weight_BHL, decays.delta_BHL, decays.whole_BHC,
        end_BHPN if start_BHPN is None else start_BHPN, end_BHPN, states_BCHPN,
        row.D_H if before_BCHPN is None else before_BCHPN, through_BCHK, *strides(left_BLHP, right_BLGN),
        *row.lengths(), row.chunks, START=start_BHPN is not None, REVERSED=before_BCHPN is not None, SLICE=entries,
        num_stages=row.tiles.ahead, **row.constants() | {"num_warps": row.tiles.light},
    )  # fmt: skip
    return states_BCHPN, end_BHPN, through_BCHK


def _group_scores(row: SSDRow, left_BLGN: Tensor, right_BLGN: Tensor) -> Tensor:
    """Return left_i . right_j for every group, and all tokens i and j of the same chunk (B, G, L in full chunks, T).

    The tensor has 4 T bytes for each token and group, and is freed after one kernel has read it. If every head has its
    own B and C, the kernels compute these products themselves, and the result is a valid pointer that no kernel reads.
    """
    length, _, groups = row.lengths()
    if not row.grouped:
        return row.D_H
    rows, chunk = len(row.B_BLGN), row.tiles.chunk
    parts = chunk // row.tiles.tokens
    scores_BGLT = row.D_H.new_empty(rows, groups, row.chunks * chunk, chunk)
    grid = row.chunks * parts, groups, rows * parts
    constants = {name: row.constants()[name] for name in ("N", "CHUNK", "BLOCK_N", "PRODUCT", "PRECISION")}
    forward_kernels.group_scores[grid](
        left_BLGN, right_BLGN, scores_BGLT, *strides(left_BLGN, right_BLGN), length, groups, OWN=row.tiles.tokens,
        SLICE=row.narrow, num_warps=4, num_stages=1, **constants,
    )  # fmt: skip
    return scores_BGLT


def _outputs(row: SSDRow, decays: Decays, before_BCHPN: Tensor) -> Tensor:
    """Return y."""
    y_BLHP = empty_in_order(row.x_BLHP)
    scores = _group_scores(row, row.C_BLGN, row.B_BLGN)
    tokens = row.tiles.tokens
    forward_kernels.outputs[row.grid(row.tiles.chunk // tokens, row.lengths()[1])](
        row.x_BLHP, row.B_BLGN, row.C_BLGN, scores, row.D_H, *decays[:5], row.documents, before_BCHPN, y_BLHP,
        *strides(row.x_BLHP, row.B_BLGN, row.C_BLGN, y_BLHP), *row.lengths(),
        DOCUMENTS=row.documents_BL is not None, ITSELF=row.itself, SCORES=row.grouped, OWN=tokens, SLICE=row.narrow,
        num_stages=row.tiles.ahead, **row.constants() | {"num_warps": row.tiles.light},
    )  # fmt: skip
    return y_BLHP


def _gradients_after(
    row: SSDRow, decays: Decays, dy_BLHP: Tensor, before_BCHPN: Tensor, grad_last_BHPN: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors that follow from state gradients.

    The first is dh, the gradient of the state after every chunk. The second is the gradient of the state before the
    row. The third holds partial sums of exp(S_T) dh . h for every chunk and head, where h is the state before the
    chunk.
    """
    return _walk(row, (dy_BLHP, row.C_BLGN, decays.enter_BHL), decays, grad_last_BHPN, before_BCHPN)


def _token_gradients(
    row: SSDRow, decays: Decays, dy_BLHP: Tensor, before_BCHPN: Tensor, after_BCHPN: Tensor
) -> tuple[Tensor, TokenTerms]:
    """Return dx, and the terms for `step_gradients`."""
    grad_x_BLHP = empty_in_order(row.x_BLHP)
    terms = TokenTerms.of(row)
    scores = _group_scores(row, row.B_BLGN, row.C_BLGN)
    parts = len(terms.pairs_KBHL)
    backward_kernels.token_gradients[row.grid(parts, row.lengths()[1])](
        row.x_BLHP, dy_BLHP, row.B_BLGN, row.C_BLGN, scores, row.D_H, *decays[:6], row.documents, before_BCHPN,
        after_BCHPN, grad_x_BLHP, *terms, *strides(row.x_BLHP, dy_BLHP, row.B_BLGN, row.C_BLGN, grad_x_BLHP),
        *row.lengths(), DOCUMENTS=row.documents_BL is not None, ITSELF=row.itself, SCORES=row.grouped,
        OWN=row.tiles.tokens, SLICE=row.inner, num_stages=1, **row.constants() | {"num_warps": row.tiles.light},
    )  # fmt: skip
    return grad_x_BLHP, terms


def _group_gradients(
    row: SSDRow, decays: Decays, dy_BLHP: Tensor, before_BCHPN: Tensor, after_BCHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of B and C.

    A group's gradient is a sum over its heads. The heads are divided among several programs (splits), so that there are
    about PROGRAMS programs. A second kernel adds their partial sums. In memory, a token's gradient of C follows its
    gradient of B, as C follows B in the convolution's output.
    """
    length, heads, groups = row.lengths()
    rows, state = len(row.B_BLGN), row.B_BLGN.shape[3]
    parts = row.tiles.chunk // row.tiles.tokens
    splits = min(heads // groups, ceil_div(PROGRAMS, rows * row.chunks * parts * groups))
    both_BLKGN = empty_in_order(row.B_BLGN.unsqueeze(2).expand(-1, -1, 2, -1, -1))
    if splits == 1:
        parts_of_both = both_BLKGN.movedim(2, 0)
    else:
        parts_of_both = before_BCHPN.new_empty(2, rows, length, splits, groups, state, dtype=torch.float32)
    of_B, of_C = parts_of_both
    _partial_group_gradient(
        row, decays, (dy_BLHP, row.x_BLHP, row.B_BLGN, before_BCHPN), out=of_C, splits=splits, reverse=False
    )
    _partial_group_gradient(
        row, decays, (row.x_BLHP, dy_BLHP, row.C_BLGN, after_BCHPN), out=of_B, splits=splits, reverse=True
    )
    if splits > 1:
        size = groups * state
        block = min(power_of_2(size), SUM_BLOCK)
        grid = ceil_div(length, SUM_TOKENS), ceil_div(size, block), 2 * rows
        backward_kernels.sum_of_splits[grid](
            parts_of_both, both_BLKGN, *strides(both_BLKGN), length, rows, size, SPLITS=splits, TOKENS=SUM_TOKENS,
            BLOCK=block,
        )  # fmt: skip
    return both_BLKGN[:, :, 0], both_BLKGN[:, :, 1]


def _partial_group_gradient(
    row: SSDRow,
    decays: Decays,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    out: Tensor,
    splits: int,
    reverse: bool,
) -> None:
    """Store every split's part of C's gradient in `out`, or of B's gradient if `reverse`.

    The first two axes of `out` are rows and tokens.

    For C, `factors` are dy, x, B and the states before chunks. For B, they are x, dy, C and the gradients of the states
    after chunks.
    """
    own_BLHP, other_BLHP, shared_BLGN, states_BCHPN = factors
    groups = row.lengths()[2]
    weight_BHL = decays.leave_BHL if reverse else decays.enter_BHL
    tokens = row.tiles.tokens
    backward_kernels.group_gradients[row.grid(row.tiles.chunk // tokens, groups * splits * row.slices)](
        own_BLHP, other_BLHP, shared_BLGN, *decays[:4], weight_BHL, row.documents, states_BCHPN, out,
        *strides(own_BLHP, other_BLHP, shared_BLGN, out), *row.lengths(), splits,
        DOCUMENTS=row.documents_BL is not None, ITSELF=row.itself, REVERSED=reverse, OWN=tokens, SLICE=row.outer,
        num_stages=row.tiles.stages, **row.constants(),
    )  # fmt: skip


def _step_gradients(
    row: SSDRow, decays: Decays, terms: TokenTerms, through_BCHK: Tensor
) -> tuple[Tensor, Sequence[Tensor | None], list[Tensor]]:
    """Return the gradient of dt, the gradients of `step` and `own_step`, and the gradients of A, D and dt_bias."""
    length, heads, _ = row.lengths()
    grad_dt_BLH = empty_in_order(row.dt_BLH)
    rows, chunks, _, blocks = through_BCHK.shape
    grads_3BCH = through_BCHK.new_empty(3, rows, chunks, heads)
    of_steps = [torch.empty_like(step_BLH) for step_BLH in row.steps]
    backward_kernels.step_gradients[row.grid(1, ceil_div(heads, HEADS))](
        row.dt_BLH, *row.rates, decays.delta_BHL, *terms, through_BCHK, grad_dt_BLH, *of_steps,
        grads_3BCH, *strides(row.dt_BLH, grad_dt_BLH), length, heads, blocks, PARTS=len(terms.pairs_KBHL),
        LOG_DECAYS=row.has_log_decays, ITSELF=row.itself, CHUNK=row.tiles.chunk, HEADS=HEADS,
        BLOCKS=power_of_2(blocks),
    )  # fmt: skip
    of_parameters = sum_of_parts(grads_3BCH.flatten(1, 2), torch.float32, precise=True)
    return grad_dt_BLH, of_steps if row.itself else [None, None], list(of_parameters)
