"""Squared ReLU (So et al. 2021).

y = relu(x)^2
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class SquaredReLUInputs(NamedTuple):
    """One tensor of any shape."""

    x: Tensor


def squared_relu(inputs: SquaredReLUInputs) -> Tensor:
    """Return relu(x)^2, in the input's dtype."""
    return F.relu(inputs.x).square()
