"""Sorts choices by expert, and moves the tokens' rows to experts and back.

A choice is a pair of a token and one of its K experts.

    place[t, k]        position of a token's k-th choice: choices of expert 0 come first, each expert's in token order
    source[n]          the choice at position n, as t K + k: the inverse of place
    to experts         rows[n] = x[source[n] // K]
    from experts       y[t] = sum over k of w[t, k] rows[place[t, k]]

With the slots of a capacity (`capacity.py`), there are more or fewer places than choices. An empty place has the source
T K and a row of zeros, and all dropped choices have the last place. The last place's row is undefined on the way to
experts; the row that comes back, and both gradients, must be zero.

Implementations other than the references here use `place` for one sum and `source` for the other. So no two threads add
to the same row, and the K terms of each sum are always added in the same order.

Legend: T tokens, K experts per token, N = T K choices, E experts, D channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class ExpertOrderInputs(NamedTuple):
    """Each token's experts, and the number of choices of each expert."""

    experts_TK: Tensor
    loads_E: Tensor


class ExpertOrder(NamedTuple):
    """Positions of choices in the order of their experts.

    source_N   the choice at each position, in int64; T K at an empty position
    place_TK   each choice's position, in int64
    ends_E     the position behind each expert's last choice, in int32, as grouped products take it
    has_slots  True if there may be empty positions, and dropped choices
    """

    source_N: Tensor
    place_TK: Tensor
    ends_E: Tensor
    has_slots: bool = False

    @property
    def slots(self) -> int | None:
        """Number of positions if there may be empty positions and dropped choices; else None."""
        if self.has_slots:
            return len(self.source_N)
        return None


class ToExpertsInputs(NamedTuple):
    """Tokens, and the order of their choices."""

    x_TD: Tensor
    order: ExpertOrder


class FromExpertsInputs(NamedTuple):
    """Rows in the order of experts, the weight of each choice, and the order."""

    rows_ND: Tensor
    weights_TK: Tensor
    order: ExpertOrder


def expert_order(inputs: ExpertOrderInputs) -> ExpertOrder:
    """Sort all choices by expert, without waiting for the device."""
    experts_TK, loads_E = inputs
    source_N = experts_TK.flatten().sort(stable=True).indices
    place_N = torch.empty_like(source_N)
    place_N[source_N] = torch.arange(len(source_N), device=source_N.device)
    return ExpertOrder(source_N, place_N.view(experts_TK.shape), loads_E.cumsum(0, dtype=torch.int32))


def to_experts(inputs: ToExpertsInputs) -> Tensor:
    """Return one row per choice (N, D), in the order of experts."""
    x_TD, order = inputs
    if order.has_slots:
        x_TD = torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])
    return x_TD[order.source_N // order.place_TK.shape[1]]


def from_experts(inputs: FromExpertsInputs) -> Tensor:
    """Return each token's weighted sum of its rows (T, D), summed in at least fp32, in the dtype of the rows."""
    rows_TKD = at_least_fp32(inputs.rows_ND)[inputs.order.place_TK]
    weighted_TKD = rows_TKD * inputs.weights_TK.to(rows_TKD.dtype)[..., None]
    return weighted_TKD.sum(1).to(inputs.rows_ND.dtype)
