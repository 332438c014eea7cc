"""Column-parallel products of a mixer's input, with the backward pass's communication overlapped.

    forward     all-gather the tokens (sequence parallelism), and multiply them with every weight
    backward    dx = sum of dy W; then, overlapped, reduce dx over the ranks and compute dW = dy^T x

With `again` a rank saves only its own tokens. They are gathered a second time while dx is computed.

A product may be returned in several parts of its channels. Each part's gradient is multiplied with its own rows of the
weight; joining them first would read and write all of them once more.

Megatron-core's column-parallel layer hides the same traffic for one weight, but on CUDA only, and gathers once for
each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hybridtron.parallel.accumulate import weight_gradient


@dataclass(frozen=True)
class Entry:
    """Communication and splitting of a mixer's products: the tensor-parallel group, and each product's parts.

    `group` is None for a single rank. `sequence`: each rank holds only some tokens, so they are gathered. `again`: they
    are gathered again in backward instead of being saved. `sizes`: for each product its parts' channels.
    """

    group: dist.ProcessGroup | None
    sequence: bool
    again: bool
    sizes: Sequence[Sequence[int]]


class EnteredProducts(torch.autograd.Function):
    """Products of one input with several weights; returns every part of every product, in order."""

    @staticmethod
    def forward(ctx: Any, x_LBD: Tensor, entry: Entry, *weights: Tensor) -> tuple[Tensor, ...]:
        if entry.sequence:
            whole_LBD, _ = _gathered(x_LBD, entry)
        else:
            whole_LBD = x_LBD
        # The weights themselves: a saved tensor may come back as another object, without `main_grad`.
        ctx.entry = entry
        ctx.weights = weights
        learns = any(ctx.needs_input_grad[2:])  # frozen weights need no saved input
        ctx.save_for_backward(None if not learns else x_LBD if entry.again else whole_LBD)
        pairs = zip(weights, entry.sizes, strict=True)
        return tuple(part for weight, sizes in pairs for part in functional.linear(whole_LBD, weight).split(sizes, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        entry = ctx.entry
        weights = ctx.weights
        (x_LBD,) = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        gathering = summing = None
        if entry.again and any(needs):
            x_LBD, gathering = _gathered(x_LBD, entry, in_background=True)
        flat = [gradient.flatten(0, 1) for gradient in gradients]
        dx_LBD = None
        if needs_x:
            aligned = zip(weights, entry.sizes, strict=True)
            rows = [part_OI for weight, sizes in aligned for part_OI in weight.split(sizes)]
            dx_TD = flat[0] @ rows[0]
            for gradient, part_OI in zip(flat[1:], rows[1:], strict=True):
                dx_TD.addmm_(gradient, part_OI)
            dx_LBD, summing = _summed(dx_TD.view(*gradients[0].shape[:2], -1), entry)
        if gathering is not None:
            gathering.wait()
        gradient_iterator = iter(flat)
        parts = [[next(gradient_iterator) for _ in sizes] for sizes in entry.sizes]
        aligned = zip(weights, parts, needs, strict=True)
        dw = [
            weight_gradient(weight, part_gradients, x_LBD.flatten(0, 1)) if need else None
            for weight, part_gradients, need in aligned
        ]
        if summing is not None:
            summing.wait()
        return (dx_LBD, None, *dw)


def _gathered(x_LBD: Tensor, entry: Entry, in_background: bool = False) -> tuple[Tensor, Any]:
    """All-gather the tokens. With `in_background` the result is valid only after waiting for the returned handle."""
    length, *sizes = x_LBD.shape
    whole_LBD = x_LBD.new_empty(length * dist.get_world_size(entry.group), *sizes)
    handle = dist.all_gather_into_tensor(whole_LBD, x_LBD.contiguous(), group=entry.group, async_op=in_background)
    return whole_LBD, handle


def _summed(dx_LBD: Tensor, entry: Entry) -> tuple[Tensor, Any]:
    """Reduce dx over the ranks; the result is valid after waiting for the returned handle.

    Under sequence parallelism this is a reduce-scatter over tokens, otherwise an all-reduce.
    """
    if entry.group is None:
        return dx_LBD, None
    if not entry.sequence:
        return dx_LBD, dist.all_reduce(dx_LBD, group=entry.group, async_op=True)
    length, *sizes = dx_LBD.shape
    share_LBD = dx_LBD.new_empty(length // dist.get_world_size(entry.group), *sizes)
    return share_LBD, dist.reduce_scatter_tensor(share_LBD, dx_LBD, group=entry.group, async_op=True)
