"""The causal convolution by Triton kernels of our own, which take a tail and document borders together.

They add up in a fixed order and keep their inputs only. Compared with the reference in Triton's interpreter, and
compiled for sm_90; unmeasured on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.conv.reference import ConvInputs, new_tail
from hybridtron.ops.dispatch import Implementation

WIDTHS = range(2, 9)


def _unsupported_reason(inputs: ConvInputs) -> str | None:
    if inputs.width not in WIDTHS:
        return f"the kernels take widths of {WIDTHS[0]} to {WIDTHS[-1]}, not {inputs.width}"
    return "the kernels have no float64" if inputs.x_BLC.dtype == torch.float64 else None


@torch.compiler.disable  # the kernels are compiled already, and what is around them is little
def causal_conv(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    return _TritonConv.apply(*inputs), new_tail(inputs)


TRITON = Implementation("triton", causal_conv, "cuda", "triton", _unsupported_reason)


class _TritonConv(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        from hybridtron.ops.conv.kernels import ConvRow, forward

        inputs = ConvInputs(*fields)
        ctx.save_for_backward(*inputs[:-1])
        ctx.activation = inputs.activation
        return forward(ConvRow.of(inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLC: Tensor) -> tuple[Tensor | None, ...]:
        from hybridtron.ops.conv.kernels import ConvRow, backward

        tensors: tuple[Any, ...] = ctx.saved_tensors
        inputs = ConvInputs(*tensors, activation=ctx.activation)
        found = backward(ConvRow.of(inputs), grad_y_BLC)
        given = (None if t is None or g is None else g.to(t.dtype) for g, t in zip(found, inputs[:4], strict=True))
        return *given, None, None
