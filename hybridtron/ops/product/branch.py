"""A projection whose input has a second consumer: on a GPU its gradient is added in place to that of the other use.

    y = x weight^T      grad of x = (grad of x's other use) + (grad of y) weight

Autograd would compute the two terms separately and add them in another pass. Here the matrix product accumulates into
the first term. So nothing else may share that tensor: the other use of x must return its gradient in a new one.

Legend: T any leading axes, I and O channels in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.product import LinearInputs, linear


def branch(inputs: LinearInputs) -> tuple[Tensor, Tensor]:
    """Return x, for its other use, and x weight^T."""
    if inputs.x_TI.is_cuda and torch.is_grad_enabled():
        return _Branch.apply(*inputs)
    return inputs.x_TI, linear(inputs)


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TI, weight_OI)
        return x_TI.view_as(x_TI), linear(LinearInputs(x_TI, weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_TI: Tensor, grad_y_TO: Tensor) -> tuple[Tensor, Tensor]:
        x_TI, weight_OI = ctx.saved_tensors
        flat_x = grad_x_TI.contiguous().flatten(0, -2)
        flat_y = grad_y_TO.flatten(0, -2)
        flat_x.addmm_(flat_y, weight_OI)
        return flat_x.view(x_TI.shape), flat_y.mT @ x_TI.flatten(0, -2)
