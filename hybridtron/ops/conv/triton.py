"""The causal convolution by Triton kernels of our own, which take a tail and document borders together.

They add up in a fixed order and keep their inputs only. Held against the reference in Triton's interpreter, and
compiled for sm_90; unmeasured on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.conv.reference import causal_conv, new_tail

WIDTHS = range(2, 9)


def _refuses(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> str | None:
    if weight_CW.shape[1] not in WIDTHS:
        return f"the kernels take widths of {WIDTHS[0]} to {WIDTHS[-1]}, not {weight_CW.shape[1]}"
    return "the kernels have no float64" if x_BLC.dtype == torch.float64 else None


@causal_conv.form("triton", device="cuda", package="triton", refuses=_refuses)
@torch.compiler.disable  # the kernels are compiled already, and what is around them is little
def _triton(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    y_BLC = _Conv.apply(x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation)
    return y_BLC, new_tail(x_BLC, tail_BTC, documents_BL, weight_CW.shape[1])


class _Conv(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        tail_BTC: Tensor | None,
        documents_BL: Tensor | None,
        activation: bool,
    ) -> Tensor:
        from hybridtron.ops.conv.kernels import Row, forward

        ctx.save_for_backward(x_BLC, weight_CW, bias_C, tail_BTC, documents_BL)
        ctx.activation = activation
        return forward(Row.of(x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLC: Tensor) -> tuple[Tensor | None, ...]:
        from hybridtron.ops.conv.kernels import Row, backward

        x_BLC, weight_CW, bias_C, tail_BTC, documents_BL = ctx.saved_tensors
        row = Row.of(x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, ctx.activation)
        grads = backward(row, grad_y_BLC)
        found = (grads.x_BLC, grads.weight_CW, grads.bias_C, grads.tail_BTC)
        wanted = (x_BLC, weight_CW, bias_C, tail_BTC)
        given = (None if t is None or g is None else g.to(t.dtype) for g, t in zip(found, wanted, strict=True))
        return *given, None, None
