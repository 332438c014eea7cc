"""A mixture of experts: routing, the experts' MLPs, and the router's losses."""

from hybridtron.ops.experts.activation import ActivatedInputs
from hybridtron.ops.experts.capacity import RowRanks, row_ranks, rows_of, slot_order
from hybridtron.ops.experts.losses import balance_loss, z_loss
from hybridtron.ops.experts.mlp import experts, experts_mlp, route
from hybridtron.ops.experts.ordered import mlp_of_rows
from hybridtron.ops.experts.parts import (
    activated_again,
    expert_choice,
    expert_linear,
    expert_order,
    from_experts,
    to_experts,
)
from hybridtron.ops.experts.permutation import ExpertOrder, ExpertOrderInputs, FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.experts.products import ExpertLinearInputs
from hybridtron.ops.experts.reference import ChoiceInputs, ExpertActivation, ExpertsInputs, Router, Routing
from hybridtron.ops.experts.routing import RouteInputs, loads_of, shares
from hybridtron.ops.experts.row_mlp import RowMLPInputs

__all__ = [
    "ActivatedInputs", "ChoiceInputs", "ExpertActivation", "ExpertLinearInputs", "ExpertOrder", "ExpertOrderInputs",
    "ExpertsInputs", "FromExpertsInputs", "RouteInputs", "Router", "Routing", "RowMLPInputs", "RowRanks",
    "ToExpertsInputs", "activated_again", "balance_loss", "expert_choice", "expert_linear", "expert_order", "experts",
    "experts_mlp", "from_experts", "loads_of", "mlp_of_rows", "route", "row_ranks", "rows_of", "shares", "slot_order",
    "to_experts", "z_loss",
]  # fmt: skip
