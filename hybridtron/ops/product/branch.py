"""Projection of a tensor x that has a second use; on a GPU, no separate kernel adds the two gradients for x.

    y = x weight^T
    gradient for x = (gradient from the second use) + (gradient for y) weight

Autograd would compute both terms and then add them with another kernel. Here, the backward pass's matrix multiplication
adds its result in place to the first term (addmm_). This overwrites the gradient tensor from the second use, so no
other code may use that tensor. On a CPU, autograd computes the gradient as usual.

Legend: T any leading axes, I input channels, O output channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.product import LinearInputs, linear


def branch(inputs: LinearInputs) -> tuple[Tensor, Tensor]:
    """Return x for its second use, and x weight^T.

    The second use must read the returned x and not `inputs.x_TI`, so that its gradient passes through this function.
    """
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
