"""The experts' MLPs, applied to rows that are sorted by expert.

The reference computes one projection of all rows at a time, as suits a GPU. The form `looped` computes the whole MLP of
one expert after another, so that an expert's hidden channels stay in a CPU's cache between its projections. It saves
the first projection alone: the backward pass computes the activation again, together with its gradient.

Legend: N rows, E experts, D width, H hidden channels of an expert, F rows of `gate_up`: 2H or H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.experts.activation import ActivatedInputs
from hybridtron.ops.experts.parts import activated_again, expert_linear
from hybridtron.ops.experts.products import ExpertLinearInputs, rows_of_experts, write_product
from hybridtron.ops.experts.reference import ExpertActivation, activated
from hybridtron.ops.product import ProductInputs, matrix_product
from hybridtron.ops.product.sums import add_product


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
            of_active_NH = _product(grad_ND[rows], down_EDH[e])
            active_NH, of_hidden = activated_again(ActivatedInputs(hidden_NF, of_active_NH, ctx.activation))
            if of_down is not None:
                write_product(grad_ND[rows].t(), active_NH, of_down[e])
            if of_gate_up is not None:
                rooms = of_gate_up[e].chunk(len(of_hidden))
                for part_NC, room_CD in zip(of_hidden, rooms, strict=True):
                    write_product(part_NC.t(), rows_ND[rows], room_CD)
            if of_rows is not None:
                weights = gate_up_EFD[e].chunk(len(of_hidden))
                write_product(of_hidden[0], weights[0], of_rows[rows])
                for part_NC, weight_CD in zip(of_hidden[1:], weights[1:], strict=True):
                    add_product(of_rows[rows], part_NC, weight_CD)
        return of_rows, None, of_gate_up, of_down, None


def _product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    return matrix_product(ProductInputs(left_MK, right_KN))
