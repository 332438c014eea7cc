"""Moves rows to experts and back by gathers alone, in both passes, on any device.

Autograd's gradient of a gather is a tensor of zeros to which rows are added. Here the gradient of a gather by one
permutation is a gather by its inverse (equations: `permutation.py`):

    grad x[t] = sum over k of grad rows[place[t, k]]
    grad rows[n] = w[source[n]] grad y[source[n] // K],   grad w[t, k] = grad y[t] . rows[place[t, k]]

An empty place (`capacity.py`) reads an arbitrary token; its values or its weight are replaced by 0.

Legend: T tokens, K experts per token, N = T K choices, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.experts.permutation import FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.precision import at_least_fp32


def to_experts(inputs: ToExpertsInputs) -> Tensor:
    order = inputs.order
    return _ToExperts.apply(inputs.x_TD, order.source_N, order.place_TK, order.has_slots)


def from_experts(inputs: FromExpertsInputs) -> Tensor:
    order = inputs.order
    return _FromExperts.apply(inputs.rows_ND, inputs.weights_TK, order.source_N, order.place_TK, order.has_slots)


TO = Implementation("gathered", to_experts)
FROM = Implementation("gathered", from_experts)


class _ToExperts(torch.autograd.Function):
    """Autograd function that saves only the order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_N: Tensor, place_TK: Tensor, has_slots: bool) -> Tensor:
        ctx.save_for_backward(place_TK)
        if not has_slots:
            return x_TD.index_select(0, source_N // place_TK.shape[1])
        last = place_TK.numel() - 1
        rows_ND = x_TD.index_select(0, source_N.clamp(max=last) // place_TK.shape[1])
        return rows_ND.masked_fill_((source_N > last)[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place_TK,) = ctx.saved_tensors
        return _summed(grads[0], place_TK), None, None, None


class _FromExperts(torch.autograd.Function):
    """Autograd function that saves rows, weights and the order."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, weights_TK: Tensor, source_N: Tensor, place_TK: Tensor, has_slots: bool
    ) -> Tensor:
        ctx.has_slots = has_slots
        ctx.save_for_backward(rows_ND, weights_TK, source_N, place_TK)
        return _summed(rows_ND, place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_ND, weights_TK, source_N, place_TK = ctx.saved_tensors
        grad_TD = at_least_fp32(grads[0])
        weights = weights_TK.flatten()
        if ctx.has_slots:
            is_empty_N = source_N == len(weights)
            source_N = source_N.clamp(max=len(weights) - 1)
            weight_N = weights[source_N].masked_fill(is_empty_N, 0).to(grad_TD.dtype)
        else:
            weight_N = weights[source_N].to(grad_TD.dtype)
        grad_rows_ND = grad_TD.index_select(0, source_N // place_TK.shape[1]).mul_(weight_N[:, None])
        products = [(grad_TD * rows_ND.index_select(0, place_T)).sum(-1) for place_T in place_TK.unbind(1)]
        return grad_rows_ND.to(rows_ND.dtype), torch.stack(products, 1).to(weights_TK.dtype), None, None, None


def _summed(rows_ND: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return each token's sum of rows, or of weighted rows, in the dtype of the rows; k = 0 is added first."""
    total_TD: Tensor | None = None
    for k, place_T in enumerate(place_TK.unbind(1)):
        rows_TD = at_least_fp32(rows_ND.index_select(0, place_T))
        if weights_TK is not None:
            rows_TD = rows_TD * weights_TK[:, k, None].to(rows_TD.dtype)
        if total_TD is None:
            total_TD = rows_TD
        else:
            total_TD = total_TD + rows_TD
    assert total_TD is not None, "a router chooses at least one expert"
    return total_TD.to(rows_ND.dtype)
