"""The elementwise part of SwiGLU, an MLP with a gate.

    y = silu(multiplier * gate) * up,   silu(g) = g * sigmoid(g)

The projections before and after the gate are in the MLP's module (`hybridtron/mixers`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.multiply import multiply


class SwiGLUInputs(NamedTuple):
    """The inputs: gate and up concatenated on the last axis, and the constant by which gate is multiplied."""

    gate_up: Tensor
    multiplier: float = 1.0


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    """Return silu(multiplier * gate) * up, in the input's dtype."""
    gate, up = inputs.gate_up.chunk(2, dim=-1)
    return F.silu(multiply(gate, inputs.multiplier)) * up
