"""Computes experts on rows that are sorted by expert: the rows of each expert are contiguous.

Legend: T tokens, N choices, D width.
"""

from __future__ import annotations

from torch import Tensor

from hybridtron.ops.dispatch import Implementation, Op
from hybridtron.ops.experts import row_mlp
from hybridtron.ops.experts.parts import expert_order, from_experts, to_experts
from hybridtron.ops.experts.permutation import ExpertOrderInputs, FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.experts.reference import ExpertsInputs
from hybridtron.ops.experts.row_mlp import RowMLPInputs

mlp_of_rows = Op(row_mlp.mlp_of_rows, (row_mlp.LOOPED,))


def experts(inputs: ExpertsInputs) -> Tensor:
    routing = inputs.routing
    order = expert_order(ExpertOrderInputs(routing.experts_TK, routing.loads_E))
    rows_ND = to_experts(ToExpertsInputs(inputs.x_TD, order))
    mlp = RowMLPInputs(rows_ND, order.ends_E, inputs.gate_up_EFD, inputs.down_EDH, inputs.activation)
    return from_experts(FromExpertsInputs(mlp_of_rows(mlp), routing.weights_TK, order))


ORDERED = Implementation("ordered", experts)
