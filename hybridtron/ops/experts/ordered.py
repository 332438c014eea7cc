"""Experts on rows in the order of experts: each expert's rows lie side by side, so that no expert searches its tokens.

Legend: T tokens, N choices, D width, H hidden channels of an expert, F rows of `gate_up`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.experts.parts import expert_linear, expert_order, from_experts, to_experts
from hybridtron.ops.experts.permutation import ExpertOrderInputs, FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.experts.products import ExpertLinearInputs
from hybridtron.ops.experts.reference import ExpertActivation, ExpertsInputs
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu


def experts(inputs: ExpertsInputs) -> Tensor:
    routing = inputs.routing
    order = expert_order(ExpertOrderInputs(routing.experts_TK, routing.loads_E))
    rows_ND = to_experts(ToExpertsInputs(inputs.x_TD, order))
    out_ND = mlp_of_rows(rows_ND, order.ends_E, inputs.gate_up_EFD, inputs.down_EDH, inputs.activation)
    return from_experts(FromExpertsInputs(out_ND, routing.weights_TK, order))


def mlp_of_rows(
    rows_ND: Tensor, ends_E: Tensor, gate_up_EFD: Tensor, down_EDH: Tensor, activation: ExpertActivation
) -> Tensor:
    """Return each row's output of its expert (N, D), without weights; expert e has the rows up to `ends_E[e]`."""
    hidden_NF = expert_linear(ExpertLinearInputs(rows_ND, gate_up_EFD, ends_E))
    if activation == "swiglu":
        hidden_NH = swiglu(SwiGLUInputs(hidden_NF))
    else:
        hidden_NH = F.relu(hidden_NF).square()
    return expert_linear(ExpertLinearInputs(hidden_NH, down_EDH, ends_E))


ORDERED = Implementation("ordered", experts)
