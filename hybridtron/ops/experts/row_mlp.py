"""The experts' MLPs on rows in the order of experts.

The reference computes one projection of all rows at a time, as suits a GPU. The form `looped` takes one expert after
another through the whole MLP, so that an expert's hidden channels stay in a CPU's cache between its projections. It
saves the first projection alone, and computes the activation again in the backward pass.

Legend: N rows, E experts, D width, H hidden channels of an expert, F rows of `gate_up`: 2H or H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.experts.parts import expert_linear
from hybridtron.ops.experts.products import ExpertLinearInputs, rows_of_experts, write_product
from hybridtron.ops.experts.reference import ExpertActivation, activated
from hybridtron.ops.product import ProductInputs, matrix_product


class RowMLPInputs(NamedTuple):
    """Rows in the order of experts, the position behind each expert's last row, in int32, and all experts' weights."""

    rows_ND: Tensor
    ends_E: Tensor
    gate_up_EFD: Tensor
    down_EDH: Tensor
    activation: ExpertActivation


def mlp_of_rows(inputs: RowMLPInputs) -> Tensor:
    """Return each row's output of its expert (N, D), without weights."""
    rows_ND, ends_E, gate_up_EFD, down_EDH, activation = inputs
    hidden_NF = expert_linear(ExpertLinearInputs(rows_ND, gate_up_EFD, ends_E))
    return expert_linear(ExpertLinearInputs(activated(hidden_NF, activation), down_EDH, ends_E))


@untraced  # the loop's slices depend on values
def looped(inputs: RowMLPInputs) -> Tensor:
    return _LoopedMLP.apply(*inputs)


LOOPED = Implementation("looped", looped, "cpu")


class _LoopedMLP(torch.autograd.Function):
    """Autograd function of a loop over experts."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, ends_E: Tensor, gate_up_EFD: Tensor, down_EDH: Tensor, activation: ExpertActivation
    ) -> Tensor:
        ctx.activation = activation
        ctx.slices = list(rows_of_experts(ends_E))
        out_ND = torch.empty_like(rows_ND)
        hidden = []
        for rows, gate_up_FD, down_DH in zip(ctx.slices, gate_up_EFD.unbind(0), down_EDH.unbind(0), strict=True):
            hidden.append(_product(rows_ND[rows], gate_up_FD.t()))
            write_product(activated(hidden[-1], activation), down_DH.t(), out_ND[rows])
        ctx.save_for_backward(rows_ND, gate_up_EFD, down_EDH, *hidden)
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        rows_ND, gate_up_EFD, down_EDH, *hidden = ctx.saved_tensors
        grad_ND = grads[0].contiguous()
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4])
        inputs = (rows_ND, gate_up_EFD, down_EDH)
        of_rows, of_gate_up, of_down = (
            torch.empty_like(x) if needed else None for x, needed in zip(inputs, wanted, strict=True)
        )
        for e, (rows, hidden_NF) in enumerate(zip(ctx.slices, hidden, strict=True)):
            with torch.enable_grad():
                hidden_NF = hidden_NF.detach().requires_grad_()
                active_NH = activated(hidden_NF, ctx.activation)
            if of_down is not None:
                write_product(grad_ND[rows].t(), active_NH.detach(), of_down[e])
            of_active_NH = _product(grad_ND[rows], down_EDH[e])
            (of_hidden_NF,) = torch.autograd.grad(active_NH, hidden_NF, of_active_NH)
            if of_gate_up is not None:
                write_product(of_hidden_NF.t(), rows_ND[rows], of_gate_up[e])
            if of_rows is not None:
                write_product(of_hidden_NF, gate_up_EFD[e], of_rows[rows])
        return of_rows, None, of_gate_up, of_down, None


def _product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    return matrix_product(ProductInputs(left_MK, right_KN))
