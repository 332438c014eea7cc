"""The launches of the Triton kernels of SSD (`kernels_forward`, `kernels_backward`).

Backward keeps the inputs alone and computes decays and states between chunks again: kept, they would be twice as large
as x. The same call gives the same bits again. Right on an H200 (benchmarks/gpu.md).

Legend: B rows, L tokens, H heads, P head size, G groups, N state size; K parts of a chunk, S splits of a group's heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.documents import document_starts
from hybridtron.ops.kernel_launch import ceil_div
from hybridtron.ops.ssd import kernels_backward, kernels_forward
from hybridtron.ops.ssd.kernels_row import SSDRow
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs
from hybridtron.ops.ssd.triton import MAX_HEAD

# To a type checker a kernel is the Python function that it is written as, which can't be launched.
forward_kernels: Any = kernels_forward
backward_kernels: Any = kernels_backward

HEADS = 8  # whose decays one program computes: their values lie side by side in dt
BLOCK = 1024  # values of a state that one program carries through the row
PROGRAMS = 264  # wanted of `group_gradients`: two for each multiprocessor of an H100; the sum's order depends on it


def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """x, B and C in one type, the widest of theirs; parameters and states in fp32; documents counted from 0."""
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (x_BLHP, B_BLGN, C_BLGN)))
    x, B, C = (t.to(shared) for t in (x_BLHP, B_BLGN, C_BLGN))
    A, D, dt_bias = (t.float() for t in (A_H, D_H, dt_bias_H))
    state = None if state_BHPN is None else state_BHPN.float()
    y_BLHP, last_BHPN = _TritonSSD.apply(x, dt_BLH, A, B, C, D, dt_bias, state, _counted(documents_BL), None, None)
    return y_BLHP.to(x_BLHP.dtype), last_BHPN


def decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    """Scan by the kernels of ssd_scan, with log decays in the place of dt."""
    slices = ceil_div(inputs.v_BLHP.shape[3], MAX_HEAD)
    y_BLHP, last_BHPN = _decay_scan(inputs if slices == 1 else _sliced(inputs, slices))
    if slices > 1:
        y_BLHP, last_BHPN = (t.unflatten(axis, (-1, slices)) for t, axis in ((y_BLHP, 2), (last_BHPN, 1)))
        y_BLHP, last_BHPN = y_BLHP.flatten(3), last_BHPN.flatten(2, 3)
    return y_BLHP, last_BHPN


def _sliced(inputs: DecayInputs, slices: int) -> DecayInputs:
    """Wide heads as several with the same decays, as no value has to do with another; of one group as before."""
    v_BLHP, state_BHPN = inputs.v_BLHP.unflatten(3, (slices, -1)).flatten(2, 3), inputs.state_BHPN
    state = None if state_BHPN is None else state_BHPN.unflatten(2, (slices, -1)).flatten(1, 2)
    by_head = (inputs.g_BLH, 2), (inputs.step_BLH, 2), (inputs.own_step_BLH, 2), (inputs.D_H, 0)
    g_BLH, step_BLH, own_step_BLH, D_H = (
        None if t is None else t.repeat_interleave(slices, dim=axis) for t, axis in by_head
    )
    assert g_BLH is not None
    tokens = inputs.q_BLGN, inputs.k_BLGN, v_BLHP, g_BLH
    return DecayInputs(*tokens, state, inputs.documents_BL, step_BLH, own_step_BLH, D_H)


def _decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    q_BLGN, k_BLGN, v_BLHP, g_BLH, state_BHPN, documents_BL, *steps, D_H = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q_BLGN, k_BLGN, v_BLHP)))
    v, k, q = (t.to(shared) for t in (v_BLHP, k_BLGN, q_BLGN))
    D = v.new_zeros(v.shape[2], dtype=torch.float32) if D_H is None else D_H.float()
    state = None if state_BHPN is None else state_BHPN.float()
    y_BLHP, last_BHPN = _TritonSSD.apply(v, g_BLH, None, k, q, D, None, state, _counted(documents_BL), *steps)
    return y_BLHP.to(v_BLHP.dtype), last_BHPN


def _counted(documents_BL: Tensor | None) -> Tensor | None:
    """Documents from 0 on in every row."""
    starts_BL = document_starts(documents_BL)
    return None if starts_BL is None else starts_BL.cumsum(1).to(torch.int32)


class _TritonSSD(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        contiguous: list[Any] = [t if t is None else t.contiguous() for t in fields]
        ctx.save_for_backward(*contiguous)
        return forward(SSDRow(*contiguous))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHPN: Tensor) -> tuple[Tensor | None, ...]:
        return backward(SSDRow(*ctx.saved_tensors), grad_y_BLHP.contiguous(), grad_last_BHPN.contiguous())


def forward(row: SSDRow) -> tuple[Tensor, Tensor]:
    """y, and the state after the row."""
    decays = Decays.of(row)
    before_BCHPN, last_BHPN = _states_before(row, decays)
    return _outputs(row, decays, before_BCHPN), last_BHPN


def backward(row: SSDRow, dy_BLHP: Tensor, grad_last_BHPN: Tensor) -> tuple[Tensor | None, ...]:
    """From the gradients of y and of the state after the row those of the inputs, in their places."""
    decays = Decays.of(row)
    before_BCHPN, _ = _states_before(row, decays)
    after_BCHPN, grad_state_BHPN, through_BCH = _gradients_after(row, decays, dy_BLHP, before_BCHPN, grad_last_BHPN)
    grad_x_BLHP, by_token = _token_gradients(row, decays, dy_BLHP, before_BCHPN, after_BCHPN)
    grad_C = _group_gradient(row, decays, dy_BLHP, row.x_BLHP, row.B_BLGN, before_BCHPN, reverse=False)
    grad_B = _group_gradient(row, decays, row.x_BLHP, dy_BLHP, row.C_BLGN, after_BCHPN, reverse=True)
    grad_dt_BLH, of_steps, (grad_A, grad_D, grad_dt_bias) = _step_gradients(row, decays, by_token, through_BCH)
    parameters = (None, grad_B, grad_C, grad_D, None) if row.given else (grad_A, grad_B, grad_C, grad_D, grad_dt_bias)
    grad_state = None if row.state_BHPN is None else grad_state_BHPN
    return grad_x_BLHP, grad_dt_BLH, *parameters, grad_state, None, *of_steps


class Decays(NamedTuple):
    """The results of `kernels_forward.decays`; without own steps `itself` is another tensor, which is not read."""

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
        made = Decays._make((itself_BHL, *per_token, whole_BHC))
        forward_kernels.decays[row.grid(1, ceil_div(heads, HEADS))](
            row.dt_BLH, *row.rates, *row.steps, row.documents, *made, length, heads,
            DOCUMENTS=row.documents_BL is not None, GIVEN=row.given, ITSELF=row.itself, CHUNK=row.tiles.chunk,
            HEADS=HEADS,
        )  # fmt: skip
        return made


def _states_before(row: SSDRow, decays: Decays) -> tuple[Tensor, Tensor]:
    """The state before every chunk, and the one after the row."""
    heads = row.lengths()[1]
    states_BCHPN = row.states()
    last_BHPN = torch.empty_like(states_BCHPN[:, 0], memory_format=torch.contiguous_format)
    forward_kernels.chunk_states[row.grid(1, heads * row.slices)](
        row.x_BLHP, row.B_BLGN, decays.leave_BHL, decays.delta_BHL, states_BCHPN, *row.lengths(),
        STEPS=True, SLICE=row.outer, num_stages=1, **row.constants(),
    )  # fmt: skip
    start = last_BHPN if row.state_BHPN is None else row.state_BHPN
    size = last_BHPN[0, 0].numel()
    forward_kernels.pass_states[ceil_div(size, BLOCK), heads, len(last_BHPN)](
        states_BCHPN, decays.whole_BHC, start, last_BHPN, states_BCHPN, decays.whole_BHC, row.chunks, heads, size,
        START=row.state_BHPN is not None, REVERSED=False, BLOCK=BLOCK,
    )  # fmt: skip
    return states_BCHPN, last_BHPN


def _outputs(row: SSDRow, decays: Decays, before_BCHPN: Tensor) -> Tensor:
    y_BLHP = torch.empty_like(row.x_BLHP)
    own = row.tiles.own
    forward_kernels.outputs[row.grid(row.tiles.chunk // own, row.lengths()[1])](
        row.x_BLHP, row.B_BLGN, row.C_BLGN, row.D_H, *decays[:5], row.documents, before_BCHPN, y_BLHP, *row.lengths(),
        DOCUMENTS=row.documents_BL is not None, ITSELF=row.itself, OWN=own, SLICE=row.inner, num_stages=1,
        **row.constants(),
    )  # fmt: skip
    return y_BLHP


def _gradients_after(
    row: SSDRow, decays: Decays, dy_BLHP: Tensor, before_BCHPN: Tensor, grad_last_BHPN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the state after every chunk and before the row, and of the sum of g over a chunk through states."""
    heads = row.lengths()[1]
    states_BCHPN, grad_state_BHPN = row.states(), torch.empty_like(grad_last_BHPN)
    forward_kernels.chunk_states[row.grid(1, heads * row.slices)](
        dy_BLHP, row.C_BLGN, decays.enter_BHL, decays.delta_BHL, states_BCHPN, *row.lengths(),
        STEPS=False, SLICE=row.outer, num_stages=1, **row.constants(),
    )  # fmt: skip
    size = grad_last_BHPN[0, 0].numel()
    blocks = ceil_div(size, BLOCK)
    through_BCHK = before_BCHPN.new_empty(*before_BCHPN.shape[:3], blocks)
    forward_kernels.pass_states[blocks, heads, len(grad_last_BHPN)](
        states_BCHPN, decays.whole_BHC, grad_last_BHPN, grad_state_BHPN, before_BCHPN, through_BCHK, row.chunks, heads,
        size, START=True, REVERSED=True, BLOCK=BLOCK,
    )  # fmt: skip
    return states_BCHPN, grad_state_BHPN, through_BCHK.sum(-1)


def _token_gradients(
    row: SSDRow, decays: Decays, dy_BLHP: Tensor, before_BCHPN: Tensor, after_BCHPN: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """dx, and by token what `step_gradients` adds up: direct, skip, scores, gain, loss and pairs."""
    own = row.tiles.own
    parts = row.tiles.chunk // own
    grad_x_BLHP, direct_BHL = torch.empty_like(row.x_BLHP), row.per_token()
    skip_BHL, gain_BHL, loss_BHL = (row.per_token() for _ in range(3))
    scores_BHL = row.per_token() if row.itself else row.D_H
    pairs_KBHL = direct_BHL.new_empty(parts, *direct_BHL.shape)
    by_token = direct_BHL, skip_BHL, scores_BHL, gain_BHL, loss_BHL, pairs_KBHL
    backward_kernels.token_gradients[row.grid(parts, row.lengths()[1])](
        row.x_BLHP, dy_BLHP, row.B_BLGN, row.C_BLGN, row.D_H, *decays[:6], row.documents, before_BCHPN, after_BCHPN,
        grad_x_BLHP, *by_token, *row.lengths(),
        DOCUMENTS=row.documents_BL is not None, ITSELF=row.itself, OWN=own, SLICE=row.inner, num_stages=1,
        **row.constants(),
    )  # fmt: skip
    return grad_x_BLHP, by_token


def _group_gradient(
    row: SSDRow,
    decays: Decays,
    own_BLHP: Tensor,
    other_BLHP: Tensor,
    shared_BLGN: Tensor,
    states: Tensor,
    reverse: bool,
) -> Tensor:
    """Of C, and reversed of B: added up over the splits of a group's heads, of which there are enough for a GPU."""
    length, heads, groups = row.lengths()
    own, rows = row.tiles.own, len(own_BLHP)
    parts = row.tiles.chunk // own
    splits = min(heads // groups, ceil_div(PROGRAMS, rows * row.chunks * parts * groups))
    grad_BLSGN = states.new_empty(rows, length, splits, groups, shared_BLGN.shape[3])
    weight_BHL = decays.leave_BHL if reverse else decays.enter_BHL
    backward_kernels.group_gradients[row.grid(parts, groups * splits * row.slices)](
        own_BLHP, other_BLHP, shared_BLGN, *decays[:4], weight_BHL, row.documents, states, grad_BLSGN, *row.lengths(),
        splits, DOCUMENTS=row.documents_BL is not None, ITSELF=row.itself, REVERSED=reverse, OWN=own, SLICE=row.outer,
        num_stages=row.tiles.stages, **row.constants(),
    )  # fmt: skip
    grad_BLGN = grad_BLSGN.squeeze(2) if splits == 1 else grad_BLSGN.sum(2)
    return grad_BLGN.to(shared_BLGN.dtype)


def _step_gradients(
    row: SSDRow, decays: Decays, by_token: tuple[Tensor, ...], through_BCH: Tensor
) -> tuple[Tensor, Sequence[Tensor | None], list[Tensor]]:
    """Compute the gradients of dt, of both steps, and of A, D and dt_bias."""
    length, heads, _ = row.lengths()
    grad_dt_BLH = torch.empty_like(row.dt_BLH)
    grads_3BCH = through_BCH.new_empty(3, *through_BCH.shape)
    of_steps = [torch.empty_like(step_BLH) for step_BLH in row.steps]
    backward_kernels.step_gradients[row.grid(1, ceil_div(heads, HEADS))](
        row.dt_BLH, *row.rates, decays.delta_BHL, *by_token, through_BCH, grad_dt_BLH, *of_steps,
        grads_3BCH, length, heads, PARTS=len(by_token[-1]), GIVEN=row.given, ITSELF=row.itself, CHUNK=row.tiles.chunk,
        HEADS=HEADS,
    )  # fmt: skip
    of_parameters = list(grads_3BCH.sum((1, 2), dtype=torch.float64).float())
    return grad_dt_BLH, of_steps if row.itself else [None, None], of_parameters
