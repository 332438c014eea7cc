"""The scan of Mamba-2 compiled for this CPU: chunks of tokens by products in the cache (`native/ssd.h`).

Forward keeps its inputs and the state before every chunk of tokens.

Legend: as in `reference`; K chunks, Q head sizes filled up to whole vectors. States are (B, H, N, Q) inside.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.native.library import call, constant, missing, threads
from hybridtron.ops.native.tensors import LOG2E, Tokens, address, like, readable, scalar, starts_of
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs, initial_state

UNIT = 256  # channels of heads that share what is made of B and C, which is then made again for the next ones
WORTH = 2**18  # states times tokens that are worth a thread: it takes some 20 us to come and go


class SSDFields(NamedTuple):
    """What is differentiated, in the order of its gradients; without parameters dt are log decays, and steps are 1."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor | None
    B_BLGN: Tensor
    C_BLGN: Tensor
    D_H: Tensor | None
    dt_bias_H: Tensor | None
    state_BHNQ: Tensor


class SSDTask(ctypes.Structure):
    """`Ssd` in ssd.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "groups", "states", "unit")),
        ("whole_rows", ctypes.c_int64),
        *((name, Tokens) for name in ("x", "dt", "b", "c", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "A", "D", "bias", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_x", "grad_dt", "grad_b", "grad_c")),
        *((name, ctypes.c_void_p) for name in ("grad_A", "grad_D", "grad_bias", "shares")),
    )


@torch.compiler.disable  # what is called is no operation of torch
def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    x_BLHP, B_BLGN, wide = inputs.x_BLHP, inputs.B_BLGN, wide_type(inputs.x_BLHP)
    A_H, D_H, dt_bias_H = (t.to(wide) for t in (inputs.A_H, inputs.D_H, inputs.dt_bias_H))
    state_BHPN = initial_state(x_BLHP, B_BLGN, inputs.state_BHPN)
    fields = SSDFields(x_BLHP, inputs.dt_BLH, A_H, B_BLGN, inputs.C_BLGN, D_H, dt_bias_H, state_BHPN.mT)
    return _over_row(fields, inputs.documents_BL)


@torch.compiler.disable
def decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    q_BLGN, k_BLGN, v_BLHP, g_BLH, state_BHPN, documents_BL = inputs
    state_BHPN = initial_state(v_BLHP, k_BLGN, state_BHPN)
    return _over_row(SSDFields(v_BLHP, g_BLH, None, k_BLGN, q_BLGN, None, None, state_BHPN.mT), documents_BL)


NATIVE = Implementation("native", ssd_scan, "cpu", missing=missing)
NATIVE_DECAY = Implementation("native", decay_scan, "cpu", missing=missing)


def _over_row(fields: SSDFields, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """With the state (B, H, N, P) filled up to whole vectors and back again."""
    size, filled = fields.x_BLHP.shape[3], constant("vector_bytes") // fields.state_BHNQ.itemsize
    state_BHNQ = torch.nn.functional.pad(fields.state_BHNQ, (0, -size % filled))
    given = fields._replace(state_BHNQ=state_BHNQ)
    y_BLHP, last_BHNQ = _NativeSSD.apply(torch.is_grad_enabled(), starts_of(documents_BL), *given)
    return y_BLHP, last_BHNQ[..., :size].mT


class _NativeSSD(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, recorded: bool, starts_BL: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        fields = _prepared(SSDFields(*given))
        task = _task(fields, starts_BL)
        last_BHNQ, y_BLHP = fields.state_BHNQ.clone(memory_format=torch.contiguous_format), like(fields.x_BLHP)
        task.state, task.y = last_BHNQ.data_ptr(), Tokens.of(y_BLHP)
        if recorded:
            chunks = -(-task.length // constant("chunk_tokens"))
            kept_BKHNQ = last_BHNQ.new_empty(task.rows, chunks, *last_BHNQ.shape[1:])
            task.kept = kept_BKHNQ.data_ptr()
            ctx.save_for_backward(starts_BL, kept_BKHNQ, *fields)
            ctx.kinds = [None if tensor is None else tensor.dtype for tensor in given]
        call(f"ssd_forward_{scalar(last_BHNQ.dtype)}", task, _threads(task))
        return y_BLHP.to(given[0].dtype), last_BHNQ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHNQ: Tensor) -> tuple[Tensor | None, ...]:
        starts_BL, kept_BKHNQ, *saved = ctx.saved_tensors
        fields = SSDFields(*saved)
        task, grad_y_BLHP = _task(fields, starts_BL), readable(grad_y_BLHP)
        grad_state_BHNQ = grad_last_BHNQ.clone(memory_format=torch.contiguous_format)
        x, dt, b, c = (like(t) for t in (fields.x_BLHP, fields.dt_BLH, fields.B_BLGN, fields.C_BLGN))
        task.state, task.kept, task.grad_y = grad_state_BHNQ.data_ptr(), kept_BKHNQ.data_ptr(), Tokens.of(grad_y_BLHP)
        task.grad_x, task.grad_dt, task.grad_b, task.grad_c = map(Tokens.of, (x, dt, b, c))
        sums_3BH = kept_BKHNQ.new_zeros(3, task.rows, task.heads)
        task.grad_A, task.grad_D, task.grad_bias = (sums_BH.data_ptr() for sums_BH in sums_3BH)
        crew, units = _threads(task), task.heads // task.unit
        task.whole_rows = task.rows % crew == 0 or task.rows > 4 * crew
        shares = None if task.whole_rows else kept_BKHNQ.new_empty(task.rows * units, task.length, 2, task.states)
        task.shares = address(shares)
        call(f"ssd_backward_{scalar(kept_BKHNQ.dtype)}", task, crew)
        of_A, of_D, of_bias = sums_3BH[:, 0]
        found = (x, dt, of_A, b, c, of_D, of_bias, grad_state_BHNQ)
        return None, None, *(kind and grad.to(kind) for grad, kind in zip(found, ctx.kinds, strict=True))


def _prepared(given: SSDFields) -> SSDFields:
    """As the sources want it: tokens readable, parameters dense, A in powers of two."""
    tokens = {name: readable(t) for name, t in given._asdict().items() if "_BL" in name}
    if given.A_H is None or given.D_H is None or given.dt_bias_H is None:
        return given._replace(**tokens, D_H=given.state_BHNQ.new_zeros(given.x_BLHP.shape[2]))
    A_H = (given.A_H * LOG2E).clamp(-1e30, 1e30).contiguous()
    return given._replace(**tokens, A_H=A_H, D_H=given.D_H.contiguous(), dt_bias_H=given.dt_bias_H.contiguous())


def _task(fields: SSDFields, starts_BL: Tensor | None) -> SSDTask:
    """What forward and backward are given alike."""
    rows, length, heads, size = fields.x_BLHP.shape
    groups, states = fields.B_BLGN.shape[2:]
    of_group = heads // groups
    together = max(k for k in range(1, of_group + 1) if of_group % k == 0 and k <= max(1, UNIT // size))
    x, dt, b, c = map(Tokens.of, (fields.x_BLHP, fields.dt_BLH, fields.B_BLGN, fields.C_BLGN))
    return SSDTask(
        rows=rows, length=length, heads=heads, size=size, groups=groups, states=states, unit=together, x=x, dt=dt, b=b,
        c=c, starts=address(starts_BL), A=address(fields.A_H), D=address(fields.D_H), bias=address(fields.dt_bias_H),
    )  # fmt: skip


def _threads(task: SSDTask) -> int:
    return threads(task.rows * task.length * task.heads * task.size * task.states / WORTH)
