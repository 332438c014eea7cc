"""The gated norm by C++ compiled for this CPU (`native/gated_norm.cpp`), as one op and as two ops.

`reference.py` defines the ops `gated_norm`, `gated_squares` and `gated_scale`, and the symbol v.

Legend: B rows (sequences in the batch), L tokens per row, E channels, H heads, P channels per head.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.gated_norm.reference import GatedNormInputs, GatedScaleInputs, GatedSquaresInputs
from hybridtron.ops.native.library import call, missing, threads, token_blocks
from hybridtron.ops.native.tensors import Tokens, address, first_part, like, readable, scalar
from hybridtron.ops.precision import wide_type

WORTH = 2**16  # elements per thread: with fewer, an additional thread gains no time


class GatedNormTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `GatedNorm` in gated_norm.cpp.

    rows, length, channels: B, L, E
    head: P, channels per head
    scaled: 1 for `gated_scale`, else 0
    y, z, out: inputs and output
    heads: each head's sum of v^2 (output of `gated_squares`), or each head's factor (input of `gated_scale`)
    weight: a weight for each channel
    grad_...: gradients; `grad_weight` has a partial sum for each token block
    eps: constant of `gated_norm`
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels", "head", "scaled")),
        *((name, Tokens) for name in ("y", "z", "heads", "out", "grad_out", "grad_y", "grad_z", "grad_heads")),
        *((name, ctypes.c_void_p) for name in ("weight", "grad_weight")),
        ("eps", ctypes.c_double),
    )


@untraced  # torch.compile can't trace a function in C++
def gated_norm(inputs: GatedNormInputs) -> Tensor:
    return _NativeGatedNorm.apply(*inputs)


@untraced
def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    return _NativeSquares.apply(*inputs)


@untraced
def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    return _NativeScale.apply(*inputs)


NORM = Implementation("native", gated_norm, "cpu", missing=missing)
SQUARES = Implementation("native", gated_squares, "cpu", missing=missing)
SCALE = Implementation("native", gated_scale, "cpu", missing=missing)


class _NativeGatedNorm(torch.autograd.Function):
    """Autograd function for `gated_norm`. It saves y, z and the weight for the backward pass.

    The compiled function computes a norm for each head, so each channel group is passed as one head.
    """

    @staticmethod
    def forward(ctx: Any, y_BLE: Tensor, z_BLE: Tensor, weight_E: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(y_BLE, z_BLE, weight_E)
        ctx.groups = groups
        ctx.eps = eps
        y, z = (readable(x).unflatten(-1, (groups, -1)) for x in (y_BLE, z_BLE))
        out = like(y)
        weight = weight_E.to(wide_type(y)).contiguous()
        task = _task(y, z, out=out)
        task.weight = address(weight)
        task.eps = eps
        _run("norm_forward", task, y)
        return out.flatten(2).to(y_BLE.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, because torch.utils.checkpoint forbids a second access
        y, z, grad = (readable(x).unflatten(-1, (ctx.groups, -1)) for x in (*saved[:2], grads[0]))
        grad_y = like(y)
        grad_z = like(z)
        weight = saved[2].to(wide_type(y)).contiguous()
        task = _task(y, z, grad_out=grad, grad_y=grad_y, grad_z=grad_z)
        of_weight = weight.new_empty(token_blocks(task.rows * task.length), *weight.shape)
        task.weight, task.grad_weight, task.eps = address(weight), address(of_weight), ctx.eps
        _run("norm_backward", task, y)
        of_inputs = (grad_y.flatten(2), grad_z.flatten(2), first_part(of_weight))
        return *(g.to(t.dtype) for g, t in zip(of_inputs, saved, strict=True)), None, None


class _NativeSquares(torch.autograd.Function):
    """Autograd function for `gated_squares`. It saves y and z for the backward pass."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
        ctx.save_for_backward(y_BLHP, z_BLHP)
        y = readable(y_BLHP)
        z = readable(z_BLHP)
        squares_BLH = torch.empty(y.shape[:3], dtype=wide_type(y))
        _run("forward", _task(y, z, heads=squares_BLH), y)
        return squares_BLH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        y_BLHP, z_BLHP = ctx.saved_tensors
        y = readable(y_BLHP)
        z = readable(z_BLHP)
        grad = readable(grads[0])
        grad_y = like(y)
        grad_z = like(z)
        _run("backward", _task(y, z, grad_heads=grad, grad_y=grad_y, grad_z=grad_z), y)
        return grad_y.to(y_BLHP.dtype), grad_z.to(z_BLHP.dtype)


class _NativeScale(torch.autograd.Function):
    """Autograd function for `gated_scale`. It saves only its inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor, scale_BLH: Tensor, weight_HP: Tensor) -> Tensor:
        ctx.save_for_backward(y_BLHP, z_BLHP, scale_BLH, weight_HP)
        y = readable(y_BLHP)
        z = readable(z_BLHP)
        scale = readable(scale_BLH)
        out = like(y)
        weight = weight_HP.to(wide_type(y)).contiguous()
        task = _task(y, z, heads=scale, out=out)
        task.scaled, task.weight = 1, address(weight)
        _run("forward", task, y)
        return out.to(y_BLHP.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors  # read once, because torch.utils.checkpoint forbids a second access
        y_BLHP, z_BLHP, scale_BLH, weight_HP = saved
        y, z, scale, grad = (readable(t) for t in (y_BLHP, z_BLHP, scale_BLH, grads[0]))
        grad_y = like(y)
        grad_z = like(z)
        grad_scale = torch.empty(scale.shape, dtype=scale.dtype)
        weight = weight_HP.to(wide_type(y)).contiguous()
        task = _task(y, z, heads=scale, grad_out=grad, grad_y=grad_y, grad_z=grad_z, grad_heads=grad_scale)
        of_weight = weight.new_empty(token_blocks(task.rows * task.length), *weight.shape)
        task.scaled, task.weight, task.grad_weight = 1, address(weight), address(of_weight)
        _run("backward", task, y)
        of_inputs = (grad_y, grad_z, grad_scale, first_part(of_weight))
        return tuple(g.to(t.dtype) for g, t in zip(of_inputs, saved, strict=True))


def _task(
    y: Tensor,
    z: Tensor,
    heads: Tensor | None = None,
    out: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_y: Tensor | None = None,
    grad_z: Tensor | None = None,
    grad_heads: Tensor | None = None,
) -> GatedNormTask:
    tensors = map(Tokens.of, (y, z, heads, out, grad_out, grad_y, grad_z, grad_heads))
    rows, length, count, head = y.shape
    return GatedNormTask(rows, length, count * head, head, 0, *tensors)


def _run(direction: str, task: GatedNormTask, y: Tensor) -> None:
    call(f"gated_norm_{direction}_{scalar(wide_type(y))}", task, threads(y.numel() / WORTH))
