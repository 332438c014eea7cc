"""The two functions that a mixer with experts calls: `route`, then `experts_mlp` (equations: `reference.py`).

Legend: T tokens, E experts, D width, H hidden channels of an expert, F rows of `gate_up`.
"""

from __future__ import annotations

from torch import Tensor

from hybridtron.ops.dispatch import Op
from hybridtron.ops.experts import ordered, reference, routing, triton
from hybridtron.ops.experts.reference import ExpertActivation, ExpertsInputs, Routing

experts = Op(reference.experts, (ordered.ORDERED,))
route = Op(routing.route, (triton.ROUTE,))


def experts_mlp(
    x_TD: Tensor, routing: Routing, gate_up_EFD: Tensor, down_EDH: Tensor, activation: ExpertActivation
) -> Tensor:
    """Return each token's sum of weighted expert outputs (T, D), in the dtype of x."""
    return experts(ExpertsInputs(x_TD, routing, gate_up_EFD, down_EDH, activation))
