"""Linear products that accumulate a weight's gradient directly in Megatron's buffer, over the step's micro-batches.

    sum += (grad of y)^T x        with `parallel.gradient_accumulation_fusion`

Without this, autograd makes a gradient in the weight's type, and Megatron adds it to the buffer. For bf16 weights with
fp32 sums that moves 12 bytes per entry and micro-batch: 2 written, 2 read, and 4 of the sum read and written. Here 8
remain, and on a GPU the gradient is not rounded to bf16. Megatron's own layers do the same on a GPU, with a kernel of
Apex or of Transformer Engine.

Every use of such a weight must go through this module, because Megatron drops a gradient that autograd makes
elsewhere.
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
    """Return True if products add this weight's gradient to Megatron's buffer themselves."""
    return getattr(weight, MARK, False)


def weight_gradient(weight: Any, grads_TO: Sequence[Tensor], x_TI: Tensor) -> Tensor:
    """Compute a weight's gradient, and return the tensor that autograd gets for it.

    For a weight that `accumulates`, the gradient is added to `weight.main_grad`, and the returned tensor is
    uninitialised: Megatron needs a tensor but does not read it. `grads_TO` are the gradients of the outputs, split
    along their channels into one or more parts.
    """
    gradient = torch.empty_like(weight)
    rows = (weight.main_grad if accumulates(weight) else gradient).split([grad_TO.shape[1] for grad_TO in grads_TO])
    for part_OI, grad_TO in zip(rows, grads_TO, strict=True):
        if accumulates(weight):
            add_product(part_OI, grad_TO.mT, x_TI)
            weight.grad_added_to_main_grad = True
        else:
            torch.mm(grad_TO.mT, x_TI, out=part_OI)
    return gradient


class AccumulatedLinear(torch.autograd.Function):
    """Product x weight^T whose backward pass accumulates the weight's gradient (see `accumulates`)."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None)
        # The weight itself: a saved tensor may come back as another object, without `main_grad`.
        ctx.weight_OI = weight_OI
        return linear(LinearInputs(x_TI, weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x_TI,) = ctx.saved_tensors
        weight_OI = ctx.weight_OI
        needs_x, needs_weight = ctx.needs_input_grad
        flat_TO = grad_TO.flatten(0, -2)
        if needs_x:
            dx = matrix_product(ProductInputs(flat_TO, weight_OI)).view(*grad_TO.shape[:-1], -1)
        else:
            dx = None
        return dx, weight_gradient(weight_OI, [flat_TO], x_TI.flatten(0, -2)) if needs_weight else None
