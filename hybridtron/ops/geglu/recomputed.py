"""The product gelu(gate) * up in torch; only gate and up are saved for the backward pass.

Autograd alone would also save gelu(gate).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.geglu.reference import GEGLUInputs
from hybridtron.ops.recomputed_gate import Activation, gated

GELU = Activation(F.gelu, torch.ops.aten.gelu_backward)


def geglu(inputs: GEGLUInputs) -> Tensor:
    return gated(inputs.gate_up, GELU)


RECOMPUTED = Implementation("recomputed", geglu)
