"""Column-parallel linear layers with the same input x, whose backward pass overlaps communication and computation.

    forward     under sequence parallelism all-gather the tokens; for every weight y = x W^T
    backward    dx = sum over weights of dy W; then reduce dx over the ranks, and meanwhile compute every dW = dy^T x

W is a weight, and y is its output. dx, dy and dW are gradients. With the option `again` a rank saves only its own
tokens of x. The tokens are all-gathered a second time in backward, while dx is computed.

A weight's output may be returned in several parts, each with a range of the output channels. Backward multiplies each
part's gradient by the weight's rows for these channels. Concatenating the gradients first would read and write all of
them once more.

Megatron-core's column-parallel layer overlaps communication and computation too, but only on CUDA. Each such layer has
one weight, so several layers would all-gather x several times.

Legend: L tokens in a row, B rows (sequences in a micro-batch), D width of x, T tokens in all rows, O output channels in
a part, I input channels of a weight (as many as D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hybridtron.parallel.fused_grad_accumulation import weight_gradient


@dataclass(frozen=True)
class InputComm:
    """Communication for the layers, and the parts into which their outputs are split.

    group: the tensor-parallel process group; None for a single rank
    sequence: True for sequence parallelism, in which each rank holds only some tokens
    again: True if tokens are gathered again in backward instead of being saved
    sizes: for each weight, how many channels each part has
    """

    group: dist.ProcessGroup | None
    sequence: bool
    again: bool
    sizes: Sequence[Sequence[int]]


class OverlappedColumnLinear(torch.autograd.Function):
    """Computes x W^T for several weights, and returns the parts of every output, in order."""

    @staticmethod
    def forward(ctx: Any, x_LBD: Tensor, comm: InputComm, *weights: Tensor) -> tuple[Tensor, ...]:
        if comm.sequence:
            whole_LBD, _ = _gathered(x_LBD, comm)
        else:
            whole_LBD = x_LBD
        # The context keeps the weight objects themselves, because `save_for_backward` may give backward other objects,
        # which have no attribute `main_grad`.
        ctx.comm = comm
        ctx.weights = weights
        learns = any(ctx.needs_input_grad[2:])  # frozen weights need no saved input
        ctx.save_for_backward(None if not learns else x_LBD if comm.again else whole_LBD)
        pairs = zip(weights, comm.sizes, strict=True)
        return tuple(part for weight, sizes in pairs for part in functional.linear(whole_LBD, weight).split(sizes, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        comm = ctx.comm
        weights = ctx.weights
        (x_LBD,) = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        gathering = summing = None
        # 1. start to gather x  2. meanwhile compute dx  3. start to reduce dx  4. meanwhile compute every dW
        if comm.again and any(needs):
            x_LBD, gathering = _gathered(x_LBD, comm, in_background=True)
        flat = [gradient.flatten(0, 1) for gradient in gradients]
        dx_LBD = None
        if needs_x:
            aligned = zip(weights, comm.sizes, strict=True)
            rows = [part_OI for weight, sizes in aligned for part_OI in weight.split(sizes)]
            dx_TD = flat[0] @ rows[0]
            for gradient, part_OI in zip(flat[1:], rows[1:], strict=True):
                dx_TD.addmm_(gradient, part_OI)
            dx_LBD, summing = _summed(dx_TD.view(*gradients[0].shape[:2], -1), comm)
        if gathering is not None:
            gathering.wait()
        gradient_iterator = iter(flat)
        parts = [[next(gradient_iterator) for _ in sizes] for sizes in comm.sizes]
        aligned = zip(weights, parts, needs, strict=True)
        dw = [
            weight_gradient(weight, part_gradients, x_LBD.flatten(0, 1)) if need else None
            for weight, part_gradients, need in aligned
        ]
        if summing is not None:
            summing.wait()
        return (dx_LBD, None, *dw)


def _gathered(x_LBD: Tensor, comm: InputComm, in_background: bool = False) -> tuple[Tensor, Any]:
    """All-gather the tokens; return all tokens, and a handle.

    With `in_background` the tokens are valid only after waiting for the handle.
    """
    length, *sizes = x_LBD.shape
    whole_LBD = x_LBD.new_empty(length * dist.get_world_size(comm.group), *sizes)
    handle = dist.all_gather_into_tensor(whole_LBD, x_LBD.contiguous(), group=comm.group, async_op=in_background)
    return whole_LBD, handle


def _summed(dx_LBD: Tensor, comm: InputComm) -> tuple[Tensor, Any]:
    """Sum dx over the ranks; return the result, and a handle. The result is valid after waiting for the handle.

    Under sequence parallelism this is a reduce-scatter by tokens, otherwise an all-reduce. A single rank has no handle.
    """
    if comm.group is None:
        return dx_LBD, None
    if not comm.sequence:
        return dx_LBD, dist.all_reduce(dx_LBD, group=comm.group, async_op=True)
    length, *sizes = dx_LBD.shape
    share_LBD = dx_LBD.new_empty(length // dist.get_world_size(comm.group), *sizes)
    return share_LBD, dist.reduce_scatter_tensor(share_LBD, dx_LBD, group=comm.group, async_op=True)
