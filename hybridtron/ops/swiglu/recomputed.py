"""The elementwise part of SwiGLU in torch; only gate and up are saved for the backward pass.

Plain autograd would also save silu(multiplier * gate).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.recomputed_gate import Activation, gated
from hybridtron.ops.swiglu.reference import SwiGLUInputs

SILU = Activation(F.silu, torch.ops.aten.silu_backward)


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    return gated(inputs.gate_up, SILU, inputs.multiplier)


RECOMPUTED = Implementation("recomputed", swiglu)
