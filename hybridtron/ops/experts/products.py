"""One projection per expert, applied to rows that are sorted by expert.

    y[n] = weight[e] x[n],   for the positions n from ends[e - 1] up to ends[e]

The reference loops over experts. The form `looped` computes the same products, and writes each product to its place in
one tensor: autograd would join the experts' outputs and gradients by copies. The form `grouped` computes all products
of an expert's rows by one kernel, and the host never waits for the experts' loads.

Legend: N rows, E experts, I input channels, O output channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.product import ProductInputs, matrix_product

ALIGNED = 16  # bytes: grouped products take only strides that are multiples


class ExpertLinearInputs(NamedTuple):
    """Rows in the order of experts, all experts' weights, and the position behind each expert's last row, in int32."""

    x_NI: Tensor
    weight_EOI: Tensor
    ends_E: Tensor


def expert_linear(inputs: ExpertLinearInputs) -> Tensor:
    """Return each row's product with its expert's weight (N, O)."""
    weights = inputs.weight_EOI.unbind(0)  # the gradient of a weight by index would have all experts' size
    return torch.cat([F.linear(inputs.x_NI[rows], weights[e]) for e, rows in enumerate(rows_of_experts(inputs.ends_E))])


def rows_of_experts(ends_E: Tensor) -> Iterator[slice]:
    """Yield each expert's rows; on a GPU the host waits for the ends."""
    first = 0
    for end in ends_E.tolist():
        yield slice(first, end)
        first = end


@untraced  # the loop's slices depend on values
def looped(inputs: ExpertLinearInputs) -> Tensor:
    return _Looped.apply(*inputs)


@untraced
def grouped(inputs: ExpertLinearInputs) -> Tensor:
    return _Grouped.apply(*inputs)


def _not_grouped(inputs: ExpertLinearInputs) -> str | None:
    if inputs.x_NI.dtype != torch.bfloat16 or inputs.weight_EOI.dtype != torch.bfloat16:
        return "for bf16: the host would wait with other types"
    if inputs.x_NI.shape[1] * 2 % ALIGNED or inputs.weight_EOI.shape[1] * 2 % ALIGNED:
        return "takes channels in multiples of 8"
    return None


LOOPED = Implementation("looped", looped)
GROUPED = Implementation("grouped", grouped, "cuda", unsupported_reason=_not_grouped)


class _Looped(torch.autograd.Function):
    """Autograd function of a loop over experts."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI)
        ctx.rows = list(rows_of_experts(ends_E))
        y_NO = x_NI.new_empty(len(x_NI), weight_EOI.shape[1])
        for rows, weight_OI in zip(ctx.rows, weight_EOI.unbind(0), strict=True):
            write_product(x_NI[rows], weight_OI.t(), y_NO[rows])
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_EOI = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        grad_x_NI = torch.empty_like(x_NI) if ctx.needs_input_grad[0] else None
        grad_weight_EOI = torch.empty_like(weight_EOI) if ctx.needs_input_grad[1] else None
        for e, rows in enumerate(ctx.rows):
            if grad_x_NI is not None:
                write_product(grad_NO[rows], weight_EOI[e], grad_x_NI[rows])
            if grad_weight_EOI is not None:
                write_product(grad_NO[rows].t(), x_NI[rows], grad_weight_EOI[e])
        return grad_x_NI, grad_weight_EOI, None


def write_product(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write the matrix product of left and right to `out_MN`; it is 0 if the inner dimension is empty."""
    if left_MK.numel() == 0:
        out_MN.zero_()
        return
    product_MN = matrix_product(ProductInputs(left_MK, right_KN, out_MN))
    if product_MN is not out_MN:
        out_MN.copy_(product_MN)


class _Grouped(torch.autograd.Function):
    """Autograd function of torch's grouped products."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI, ends_E)
        if len(x_NI) == 0:  # grouped_mm promises nothing for products without rows
            return x_NI.new_zeros(0, weight_EOI.shape[1])
        return F.grouped_mm(x_NI, weight_EOI.mT, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_EOI, ends_E = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        if len(x_NI) == 0:
            return torch.zeros_like(x_NI), torch.zeros_like(weight_EOI), None
        grad_x_NI = F.grouped_mm(grad_NO, weight_EOI, offs=ends_E) if ctx.needs_input_grad[0] else None
        grad_weight_EOI = F.grouped_mm(grad_NO.mT, x_NI, offs=ends_E) if ctx.needs_input_grad[1] else None
        return grad_x_NI, grad_weight_EOI, None
