"""The compiled recurrence (`recurrence.h`) as an operation with gradients.

Forward keeps its inputs and the state before every chunk of tokens, as the chunked forms do.

Legend: B rows, L tokens, E channels, N state entries per channel.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.native.library import call, constant, threads
from hybridtron.ops.native.tensors import LOG2E, Tokens, address, like, readable, scalar, starts_of

UNIT = 128  # channels of one unit of work: their decays and states of a chunk stay in the second cache
WORTH = 2**18  # states times tokens that are worth a thread: it takes some 20 us to come and go


class RecurrenceInputs(NamedTuple):
    """What is differentiated, in the order of its gradients."""

    state_BNE: Tensor
    x_BLE: Tensor
    dt_BLE: Tensor
    A_NE: Tensor
    b_BLN: Tensor
    c_BLN: Tensor
    D_E: Tensor
    bias_E: Tensor
    z_BLE: Tensor | None


class RecurrenceTask(ctypes.Structure):
    """`Recurrence` in recurrence.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels", "states", "groups", "unit")),
        ("whole_rows", ctypes.c_int64),
        *((name, Tokens) for name in ("x", "dt", "b", "c", "z", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "A", "D", "bias", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_x", "grad_dt", "grad_b", "grad_c", "grad_z")),
        *((name, ctypes.c_void_p) for name in ("grad_A", "grad_D", "grad_bias", "shares")),
    )


def recurrence(inputs: RecurrenceInputs, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the state after the last token (B, N, E). Parameters come in the type of the state."""
    return _NativeRecurrence.apply(torch.is_grad_enabled(), starts_of(documents_BL), *inputs)


class _NativeRecurrence(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, recorded: bool, starts_BL: Tensor | None, *fields: Any) -> tuple[Tensor, ...]:
        given = RecurrenceInputs(*fields)
        inputs = _prepared(given)
        task = _task(inputs, starts_BL)
        last_BNE, y_BLE = inputs.state_BNE.clone(memory_format=torch.contiguous_format), like(inputs.x_BLE)
        task.state, task.y = last_BNE.data_ptr(), Tokens.of(y_BLE)
        if recorded:
            chunks = -(-task.length // constant("chunk_tokens"))
            kept_BKNE = last_BNE.new_empty(task.rows, chunks, task.states, task.channels)
            task.kept = kept_BKNE.data_ptr()
            ctx.save_for_backward(starts_BL, kept_BKNE, *inputs)
            ctx.kinds = [None if t is None else t.dtype for t in given]
        call(f"recurrence_forward_{scalar(last_BNE.dtype)}", task, _threads(task))
        return y_BLE.to(given.x_BLE.dtype), last_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLE: Tensor, grad_last_BNE: Tensor) -> tuple[Tensor | None, ...]:
        starts_BL, kept_BKNE, *fields = ctx.saved_tensors
        inputs = RecurrenceInputs(*fields)
        task = _task(inputs, starts_BL)
        grad_y_BLE = readable(grad_y_BLE)
        grad_state_BNE = grad_last_BNE.clone(memory_format=torch.contiguous_format)
        of_tokens = {
            name: None if t is None else like(t)
            for name, t in zip(("x", "dt", "b", "c", "z"), _tokens_of(inputs), strict=True)
        }
        task.state, task.kept, task.grad_y = grad_state_BNE.data_ptr(), kept_BKNE.data_ptr(), Tokens.of(grad_y_BLE)
        for name, tensor in of_tokens.items():
            setattr(task, f"grad_{name}", Tokens.of(tensor))
        grad_A = torch.zeros_like(kept_BKNE[:, 0])
        grad_D, grad_bias = kept_BKNE.new_zeros(2, task.rows, task.channels)
        task.grad_A, task.grad_D, task.grad_bias = grad_A.data_ptr(), grad_D.data_ptr(), grad_bias.data_ptr()
        crew = _threads(task)
        task.whole_rows = task.rows % crew == 0 or task.rows > 4 * crew
        units = -(-task.channels // task.unit)
        shares = None if task.whole_rows else kept_BKNE.new_empty(task.rows * units, task.length, 2, task.states)
        task.shares = address(shares)
        call(f"recurrence_backward_{scalar(kept_BKNE.dtype)}", task, crew)
        x, dt, b, c, z = of_tokens.values()
        found = (grad_state_BNE, x, dt, grad_A[0], b, c, grad_D[0], grad_bias[0], z)
        typed = (None if g is None else g.to(kind) for g, kind in zip(found, ctx.kinds, strict=True))
        return None, None, *typed


def _prepared(given: RecurrenceInputs) -> RecurrenceInputs:
    """As the sources want it: tokens readable, parameters dense, A in powers of two."""
    tokens = {name: readable(t) for name, t in given._asdict().items() if name.find("_BL") > 0 and t is not None}
    A_NE = (given.A_NE * LOG2E).clamp(-1e30, 1e30)  # the compiled exponential takes finite numbers
    parameters = {"A_NE": A_NE, "D_E": given.D_E, "bias_E": given.bias_E}
    return given._replace(**tokens, **{name: t.contiguous() for name, t in parameters.items()})


def _tokens_of(inputs: RecurrenceInputs) -> tuple[Tensor | None, ...]:
    return inputs.x_BLE, inputs.dt_BLE, inputs.b_BLN, inputs.c_BLN, inputs.z_BLE


def _task(inputs: RecurrenceInputs, starts_BL: Tensor | None) -> RecurrenceTask:
    """What forward and backward are given alike."""
    rows, length, channels = inputs.x_BLE.shape
    x, dt, b, c, z = map(Tokens.of, _tokens_of(inputs))
    return RecurrenceTask(
        rows=rows, length=length, channels=channels, states=inputs.state_BNE.shape[1], groups=1,
        unit=min(UNIT, channels), x=x, dt=dt, b=b, c=c, z=z, starts=address(starts_BL), A=address(inputs.A_NE),
        D=address(inputs.D_E), bias=address(inputs.bias_E),
    )  # fmt: skip


def _threads(task: RecurrenceTask) -> int:
    return threads(task.rows * task.length * task.channels * task.states / WORTH)
