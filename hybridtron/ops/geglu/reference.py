"""The elementwise part of GEGLU (Shazeer 2020).

    y = gelu(gate) * up,   gelu(g) = g Phi(g)

Phi is the standard normal distribution's cumulative distribution function, without the tanh approximation. The
projections before and after this op belong to the mixer, the sub-layer that uses the op.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class GEGLUInputs(NamedTuple):
    """One tensor from one projection. Its last axis has the channels of `gate`, then the channels of `up`."""

    gate_up: Tensor


def geglu(inputs: GEGLUInputs) -> Tensor:
    """Return gelu(gate) * up, in the input's dtype."""
    gate, up = inputs.gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up
