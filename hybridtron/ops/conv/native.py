"""The causal convolution by C++ compiled for this CPU (`native/convolution.cpp`): taps, bias and SiLU in one pass.

Legend: B rows (sequences in the batch), L tokens per row, C channels, W width (number of taps), T = W - 1 tail tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.conv.reference import ConvInputs
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.library import call, missing, threads, token_blocks
from hybridtron.ops.native.tensors import Tokens, address, first_part, like, readable, scalar, starts_of
from hybridtron.ops.precision import wide_type

MOST_TAPS = 32  # must equal the limit in convolution.cpp
WORTH = 2**16  # elements per thread: with fewer, an additional thread gains no time


class ConvolutionTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Convolution` in convolution.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels", "width", "activation")),
        *((name, Tokens) for name in ("x", "tail", "y", "grad_y", "grad_x", "grad_tail")),
        *((name, ctypes.c_void_p) for name in ("starts", "weight", "bias", "grad_weight")),
    )


@untraced  # torch.compile can't trace a function in C++
def causal_conv(inputs: ConvInputs) -> Tensor:
    """Run the compiled convolution."""
    return _NativeConv.apply(
        inputs.x_BLC,
        inputs.weight_CW,
        inputs.bias_C,
        inputs.tail_BTC,
        starts_of(inputs.documents_BL),
        inputs.activation,
    )


def _unsupported_reason(inputs: ConvInputs) -> str | None:
    if inputs.width <= MOST_TAPS:
        return None
    return f"takes widths up to {MOST_TAPS}, not {inputs.width}"


NATIVE = Implementation("native", causal_conv, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


class _NativeConv(torch.autograd.Function):
    """Autograd function around the compiled functions. It saves only the inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x_BLC, weight_CW, bias_C, tail_BTC, starts_BL, activation = arguments
        ctx.kinds = [None if t is None else t.dtype for t in arguments[:4]]
        wide = wide_type(x_BLC)
        weight_WC = weight_CW.t().to(wide).contiguous()
        if bias_C is None:
            bias = weight_WC.new_zeros(len(weight_CW))
        else:
            bias = bias_C.to(wide).contiguous()
        if tail_BTC is not None:
            tail_BTC = readable(tail_BTC.to(x_BLC.dtype))
        x_BLC = readable(x_BLC)
        ctx.save_for_backward(x_BLC, weight_WC, bias, tail_BTC, starts_BL)
        ctx.activation = activation
        y_BLC = like(x_BLC)
        task = _task(activation, x_BLC, weight_WC, bias, tail_BTC, starts_BL)
        if y_BLC.dtype in (wide, torch.bfloat16):
            computed = y_BLC
        else:
            computed = y_BLC.to(wide)
        task.y = Tokens.of(computed)
        call(f"convolution_forward_{scalar(wide)}", task, threads(x_BLC.numel() / WORTH))
        return computed.to(y_BLC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        x_BLC, weight_WC, _, tail_BTC, _ = saved
        task = _task(ctx.activation, *saved)
        grad_y_BLC = readable(grads[0])
        grad_x_BLC = like(x_BLC)
        if tail_BTC is None:
            grad_tail_BTC = None
        else:
            grad_tail_BTC = like(tail_BTC).zero_()
        task.grad_y, task.grad_x, task.grad_tail = map(Tokens.of, (grad_y_BLC, grad_x_BLC, grad_tail_BTC))
        parts = task.rows * token_blocks(task.length)
        of_weight = weight_WC.new_empty(parts, task.width + 1, task.channels)
        task.grad_weight = of_weight.data_ptr()
        call(f"convolution_backward_{scalar(weight_WC.dtype)}", task, threads(x_BLC.numel() / WORTH))
        of_weight_WC = first_part(of_weight)
        of_inputs = (grad_x_BLC, of_weight_WC[:-1].t(), of_weight_WC[-1], grad_tail_BTC)
        typed = (None if k is None or g is None else g.to(k) for g, k in zip(of_inputs, ctx.kinds, strict=True))
        return *typed, None, None


def _task(activation: bool, *saved: Any) -> ConvolutionTask:
    x_BLC, weight_WC, bias_C, tail_BTC, starts_BL = saved
    rows, length, channels = x_BLC.shape
    return ConvolutionTask(
        rows=rows, length=length, channels=channels, width=len(weight_WC), activation=activation, x=Tokens.of(x_BLC),
        tail=Tokens.of(tail_BTC), starts=address(starts_BL), weight=address(weight_WC), bias=address(bias_C),
    )  # fmt: skip
