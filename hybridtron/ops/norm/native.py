"""Root-mean-square norm by C++ compiled for this CPU (`native/norm.cpp`), alone or after an addition."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, left_to_torch_compile, untraced
from hybridtron.ops.native.library import call, missing, threads, token_blocks
from hybridtron.ops.native.tensors import Tokens, address, as_rows, first_part, like, scalar, unsupported_types
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs
from hybridtron.ops.precision import narrower, wide_type

WORTH = 2**16  # elements per thread: with fewer, an additional thread gains no time


class NormTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Norm` in norm.cpp.

    rows, length, channels: x's shape, (rows, tokens, channels)
    x: the input; in the backward pass, the tensor that was normed
    added, sum: tensor to add to x, and the sum; null for `rms_norm`
    y: the norm
    weight: a weight for each channel
    grad_...: gradients; `grad_weight` has a partial sum for each token block
    eps: constant of the norm
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels")),
        *((name, Tokens) for name in ("x", "added", "sum", "y", "grad_y", "grad_sum", "grad_x")),
        *((name, ctypes.c_void_p) for name in ("weight", "grad_weight")),
        ("eps", ctypes.c_double),
    )


def _unsupported_reason(inputs: RMSNormInputs | AddRMSNormInputs) -> str | None:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if (reason := left_to_torch_compile() or unsupported_types(*tensors)) is not None:
        return reason
    if isinstance(inputs, AddRMSNormInputs):
        x = inputs.x
        added = inputs.added
        if x.shape != added.shape or torch.promote_types(x.dtype, added.dtype) != x.dtype:
            difference = f"not {added.dtype} {[*added.shape]} to {x.dtype} {[*x.shape]}"
            return f"adds tensors of one shape, the second no wider than the first, {difference}"
    return None


@untraced  # torch.compile can't trace a function in C++
def rms_norm(inputs: RMSNormInputs) -> Tensor:
    """Return the norm over the last axis.

    If x has four axes and its second axis is the outermost in memory, the first two axes are exchanged for the call, so
    that x is not copied.
    """
    x, weight, eps = inputs
    if x.dim() == 4 and x.stride(0) < x.stride(1):
        return _NativeNorm.apply(x.transpose(0, 1), weight, eps).transpose(0, 1)
    return _NativeNorm.apply(x, weight, eps)


@untraced
def add_rms_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    return _NativeAddNorm.apply(*inputs)


NORM: Implementation[RMSNormInputs, Tensor] = Implementation(
    "native", rms_norm, "cpu", unsupported_reason=_unsupported_reason, missing=missing
)
ADD_NORM: Implementation[AddRMSNormInputs, tuple[Tensor, Tensor]] = Implementation(
    "native", add_rms_norm, "cpu", unsupported_reason=_unsupported_reason, missing=missing
)


class _NativeNorm(torch.autograd.Function):
    """Autograd function for `rms_norm`. It saves only its inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, None, weight, eps)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_backward(x, weight, ctx.eps, grads[0], None), None


class _NativeAddNorm(torch.autograd.Function):
    """Autograd function for `add_rms_norm`. It saves the sum and the weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        summed, y = _forward(x, added, weight, eps)
        ctx.save_for_backward(summed, weight)
        ctx.eps = eps
        ctx.added = added.dtype
        return summed, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        summed, weight = ctx.saved_tensors
        grad_x, grad_weight = _backward(summed, weight, ctx.eps, grad_y, grad_sum)
        return grad_x, grad_x.to(ctx.added), grad_weight, None


def _forward(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + added (or x if `added` is None), and its norm."""
    rows = as_rows(x)
    wide = weight.to(wide_type(x)).contiguous()
    if (kind := narrower(x.dtype, weight.dtype)) == x.dtype:
        y = like(rows)
    else:
        y = like(rows).to(kind)
    task = _task(rows, wide, eps)
    task.y = Tokens.of(y)
    summed = x
    if added is not None:
        added = as_rows(added)
        summed = like(rows)
        task.added, task.sum = Tokens.of(added), Tokens.of(summed)
    call(f"norm_forward_{scalar(wide.dtype)}", task, threads(x.numel() / WORTH))
    return summed.reshape(x.shape), y.reshape(x.shape)


def _backward(x: Tensor, weight: Tensor, eps: float, grad_y: Tensor, grad_sum: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients for x (the tensor that was normed) and for the weight.

    If `grad_sum` is given, it is added to the gradient for x.
    """
    rows = as_rows(x)
    wide = weight.to(wide_type(x)).contiguous()
    task = _task(rows, wide, eps)
    grad_x = like(rows)
    grad_y = as_rows(grad_y)
    grad_sum = None if grad_sum is None else as_rows(grad_sum)
    task.grad_x, task.grad_y, task.grad_sum = map(Tokens.of, (grad_x, grad_y, grad_sum))
    of_weight = wide.new_empty(token_blocks(task.rows * task.length), task.channels)
    task.grad_weight = of_weight.data_ptr()
    call(f"norm_backward_{scalar(wide.dtype)}", task, threads(x.numel() / WORTH))
    return grad_x.reshape(x.shape), first_part(of_weight).to(weight.dtype)


def _task(x: Tensor, weight: Tensor, eps: float) -> NormTask:
    rows, length, channels = x.shape
    sizes = {"rows": rows, "length": length, "channels": channels}
    return NormTask(**sizes, x=Tokens.of(x), weight=address(weight), eps=eps)
