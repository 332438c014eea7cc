"""A mixture of experts: routing, the experts' MLPs, and the router's losses."""

from hybridtron.ops.experts.losses import balance_loss, z_loss
from hybridtron.ops.experts.mlp import expert_choice, experts, experts_mlp, loads_of, route
from hybridtron.ops.experts.reference import ChoiceInputs, ExpertActivation, ExpertsInputs, Router, Routing

__all__ = [
    "ChoiceInputs", "ExpertActivation", "ExpertsInputs", "Router", "Routing", "balance_loss", "expert_choice",
    "experts", "experts_mlp", "loads_of", "route", "z_loss",
]  # fmt: skip
