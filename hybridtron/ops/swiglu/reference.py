"""The gate of a SwiGLU block.

    y = silu(gate) * up,   silu(g) = g * sigmoid(g)

Only the elementwise part: the projections before and after it belong to the mixer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class SwiGLUInputs(NamedTuple):
    """Two tensors of one shape."""

    gate: Tensor
    up: Tensor


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    """silu(gate) * up, in the dtype of the inputs."""
    return F.silu(inputs.gate) * inputs.up
