"""The gate of a SwiGLU block.

    y = silu(multiplier * gate) * up,   silu(g) = g * sigmoid(g)

Only the elementwise part: the projections before and after it belong to the mixer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.multiplied import multiplied


class SwiGLUInputs(NamedTuple):
    """Gate and up, concatenated on the last axis as one projection returns them, and the gate's multiplier."""

    gate_up: Tensor
    multiplier: float = 1.0


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    """Return silu(multiplier * gate) * up, in the dtype of the input."""
    gate, up = inputs.gate_up.chunk(2, dim=-1)
    return F.silu(multiplied(gate, inputs.multiplier)) * up
