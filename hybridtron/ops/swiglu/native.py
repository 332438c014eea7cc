"""The gate of SwiGLU compiled for this CPU (`native/swiglu.cpp`): one pass, which keeps the two inputs for backward."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.native.library import call, missing, threads
from hybridtron.ops.native.tensors import KINDS, Tokens, as_rows, like, scalar
from hybridtron.ops.precision import wide_type
from hybridtron.ops.swiglu.reference import SwiGLUInputs

WORTH = 2**16  # inputs that are worth a thread


class SwiGLUTask(ctypes.Structure):
    """`SwiGLU` in swiglu.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels")),
        *((name, Tokens) for name in ("gate", "up", "y", "grad_y", "grad_gate", "grad_up")),
    )


def _unsupported_reason(inputs: SwiGLUInputs) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile joins the reference to what stands around it"
    if inputs.gate.dtype not in KINDS or inputs.gate.dtype != inputs.up.dtype:
        return "takes two tensors of fp32, float64 or bf16"
    return None if inputs.gate.shape == inputs.up.shape else "takes two tensors of one shape"


@torch.compiler.disable  # what is called is no operation of torch
def swiglu(inputs: SwiGLUInputs) -> Tensor:
    return _NativeGate.apply(*inputs)


NATIVE = Implementation("native", swiglu, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


class _NativeGate(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate_rows, up_rows = as_rows(gate), as_rows(up)
        y = like(gate_rows)
        task = _task(gate_rows, up_rows)
        task.y = Tokens.of(y)
        call(f"swiglu_forward_{scalar(wide_type(gate))}", task, threads(gate.numel() / WORTH))
        return y.reshape(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_rows, up_rows, grad_y = as_rows(gate), as_rows(up), as_rows(grads[0])
        task, grad_gate, grad_up = _task(gate_rows, up_rows), like(gate_rows), like(up_rows)
        task.grad_y, task.grad_gate, task.grad_up = map(Tokens.of, (grad_y, grad_gate, grad_up))
        call(f"swiglu_backward_{scalar(wide_type(gate))}", task, threads(gate.numel() / WORTH))
        return grad_gate.reshape(gate.shape), grad_up.reshape(up.shape)


def _task(gate: Tensor, up: Tensor) -> SwiGLUTask:
    rows, length, channels = gate.shape
    return SwiGLUTask(rows=rows, length=length, channels=channels, gate=Tokens.of(gate), up=Tokens.of(up))
