"""The gate of a GEGLU block (Shazeer 2020).

    y = gelu(gate) * up,   gelu(g) = g Phi(g), Phi the distribution function of the standard normal: exact, no tanh

Only the elementwise part: the projections before and after it belong to the mixer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class GEGLUInputs(NamedTuple):
    """Gate and up side by side on the last axis, as one projection writes them."""

    gate_up: Tensor


def geglu(inputs: GEGLUInputs) -> Tensor:
    """Return gelu(gate) * up, in the dtype of the input."""
    gate, up = inputs.gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up
