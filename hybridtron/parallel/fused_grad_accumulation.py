"""Linear layers whose backward pass adds the weight's gradient directly to Megatron's gradient buffer.

    y = x W^T        main_grad += dy^T x        with the option `parallel.gradient_accumulation_fusion`

x is the input, W is the weight, y is the output, and dy is the output's gradient. The buffer accumulates the weights'
gradients from all micro-batches in a step; `main_grad` is the buffer's part for W. Without this option autograd makes a
gradient in the weight's dtype, and Megatron adds the gradient to the buffer. For bf16 weights with an fp32 buffer this
moves 12 bytes per element and micro-batch: the gradient is written and read (2 bytes each), and the buffer is read and
written (4 bytes each). With the option and torch 2.13 or newer, only the 8 bytes for the buffer are moved, and on a GPU
the gradient is not rounded to bf16. Older versions of torch first multiply, and then add. Megatron's own layers have a
similar option, with a GPU kernel from Apex or Transformer Engine.

With the option, every use of the weight must go through this module, because Megatron ignores a gradient that autograd
makes for the weight.

Legend: T tokens, I input features, O output features. Some inputs have two axes for tokens in place of T.
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


def is_fused(weight: Tensor) -> bool:
    """Return True if the functions in this file add this weight's gradient to Megatron's buffer."""
    return getattr(weight, MARK, False)


def weight_gradient(weight: Any, grads_TO: Sequence[Tensor], x_TI: Tensor) -> Tensor:
    """Compute a weight's gradient, and return a tensor for autograd.

    `grads_TO` is the output's gradient, split along the output features into one or more parts. The returned tensor is
    the weight's gradient, unless `is_fused(weight)`. For a fused weight, the gradient is added to `weight.main_grad`,
    and the returned tensor is uninitialized: autograd needs a tensor, but Megatron's hook discards this tensor unread.
    """
    gradient = torch.empty_like(weight)
    rows = (weight.main_grad if is_fused(weight) else gradient).split([grad_TO.shape[1] for grad_TO in grads_TO])
    for part_OI, grad_TO in zip(rows, grads_TO, strict=True):
        if is_fused(weight):
            add_product(part_OI, grad_TO.mT, x_TI)
            weight.grad_added_to_main_grad = True
        else:
            torch.mm(grad_TO.mT, x_TI, out=part_OI)
    return gradient


class FusedAccumulationLinear(torch.autograd.Function):
    """Computes x W^T; the backward pass adds the weight's gradient to `main_grad` if `is_fused(weight)`."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None)
        # The context keeps the weight object itself, because `save_for_backward` may give backward another object,
        # which has no attribute `main_grad`.
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
