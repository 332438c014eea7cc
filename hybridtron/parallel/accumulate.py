"""Products that add a weight's gradient to the sum over the step's micro-batches, where Megatron keeps that sum.

    sum += (grad of y)^T x        with `parallel.gradient_accumulation_fusion`

Otherwise autograd makes a gradient in the weight's type, and Megatron adds it. For bf16 weights with sums in fp32 that
is 12 bytes for each entry and micro-batch: 2 written, 2 read, and 4 of the sum read and written. Here 8 are left, and
on a GPU the gradient is not rounded to bf16. Megatron's own layers do the same with a kernel of Apex or of Transformer
Engine, on a GPU.

Of such a weight all uses must be here: what autograd makes of it besides is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.product import LinearInputs, ProductInputs, linear, matrix_product
from hybridtron.ops.product.sums import add_product

MARK = "gradient_is_accumulated_by_products"


def accumulates(weight: Tensor) -> bool:
    """Whether products add to its sum."""
    return getattr(weight, MARK, False)


def weight_gradient(weight: Any, grads_TO: Sequence[Tensor], x_TI: Tensor) -> Tensor:
    """What autograd gets: the gradient, or where the sum has it, memory that nobody reads (Megatron asks for some).

    `grads_TO` are those of the outputs, in one or more parts of their channels.
    """
    made = torch.empty_like(weight)
    rows = (weight.main_grad if accumulates(weight) else made).split([grad_TO.shape[1] for grad_TO in grads_TO])
    for part_OI, grad_TO in zip(rows, grads_TO, strict=True):
        if accumulates(weight):
            add_product(part_OI, grad_TO.mT, x_TI)
            weight.grad_added_to_main_grad = True
        else:
            torch.mm(grad_TO.mT, x_TI, out=part_OI)
    return made


class AccumulatedLinear(torch.autograd.Function):
    """x weight^T, of a weight that `accumulates`."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None)
        ctx.weight_OI = weight_OI  # itself: what autograd has saved may come back as another tensor, without its sum
        return linear(LinearInputs(x_TI, weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x_TI,), weight_OI = ctx.saved_tensors, ctx.weight_OI
        needs_x, needs_weight = ctx.needs_input_grad
        flat_TO = grad_TO.flatten(0, -2)
        of_x = matrix_product(ProductInputs(flat_TO, weight_OI)).view(*grad_TO.shape[:-1], -1) if needs_x else None
        return of_x, weight_gradient(weight_OI, [flat_TO], x_TI.flatten(0, -2)) if needs_weight else None
