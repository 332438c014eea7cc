"""The elementwise part of SwiGLU by C++ compiled for this CPU (`native/swiglu.cpp`); only the input is saved."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, left_to_torch_compile, untraced
from hybridtron.ops.native.library import call, missing, threads
from hybridtron.ops.native.tensors import Tokens, as_rows, like, scalar, unsupported_types
from hybridtron.ops.precision import wide_type
from hybridtron.ops.swiglu.reference import SwiGLUInputs

WORTH = 2**16  # elements of gate per thread; with fewer elements an additional thread costs more than it saves


class SwiGLUTask(ctypes.Structure):
    """Arguments for the compiled functions, with the fields of the C++ struct `SwiGLU` in swiglu.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels")),
        *((name, Tokens) for name in ("gate", "up", "y", "grad_y", "grad_gate", "grad_up")),
        ("multiplier", ctypes.c_double),
    )


def _unsupported_reason(inputs: SwiGLUInputs) -> str | None:
    return left_to_torch_compile() or unsupported_types(inputs.gate_up)


@untraced  # torch.compile can't trace a call of compiled code
def swiglu(inputs: SwiGLUInputs) -> Tensor:
    return _NativeGate.apply(*inputs)


NATIVE = Implementation("native", swiglu, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


class _NativeGate(torch.autograd.Function):
    """Autograd function that saves only its input; gate and up are the halves of the input's last axis."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, multiplier: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.multiplier = multiplier
        gate, up = as_rows(gate_up).chunk(2, -1)
        y = like(gate)
        task = _task(gate, up, multiplier)
        task.y = Tokens.of(y)
        call(f"swiglu_forward_{scalar(wide_type(gate))}", task, threads(gate.numel() / WORTH))
        return y.reshape(*gate_up.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        rows = as_rows(gate_up)
        grad_rows = like(rows)
        of_gate, of_up = grad_rows.chunk(2, -1)
        write_gradients(SwiGLUInputs(rows, ctx.multiplier), as_rows(grads[0]), GradientRooms(of_gate, of_up))
        return grad_rows.reshape(gate_up.shape), None


class GradientRooms(NamedTuple):
    """Tensors (rows, tokens, channels) for the gradients of gate and up, and for y if it is computed again."""

    gate: Tensor
    up: Tensor
    y: Tensor | None = None


def write_gradients(inputs: SwiGLUInputs, grad_y: Tensor, rooms: GradientRooms) -> None:
    """Write the gradients of gate and up to their rooms. All tensors have the axes (rows, tokens, channels)."""
    gate, up = inputs.gate_up.chunk(2, -1)
    task = _task(gate, up, inputs.multiplier)
    task.grad_y, task.grad_gate, task.grad_up, task.y = map(Tokens.of, (grad_y, *rooms))
    call(f"swiglu_backward_{scalar(wide_type(gate))}", task, threads(gate.numel() / WORTH))


def _task(gate: Tensor, up: Tensor, multiplier: float) -> SwiGLUTask:
    rows, length, channels = gate.shape
    parts = {"gate": Tokens.of(gate), "up": Tokens.of(up)}
    return SwiGLUTask(rows=rows, length=length, channels=channels, multiplier=multiplier, **parts)
