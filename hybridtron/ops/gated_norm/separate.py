"""The norm before a gate by the op `rms_norm` and torch's operations, for CPUs and for torch.compile.

Legend: B rows, L tokens per row, H heads, P channels per head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.gated_norm.reference import NormBeforeGateInputs
from hybridtron.ops.norm import RMSNormInputs, rms_norm


def norm_before_gate(inputs: NormBeforeGateInputs) -> Tensor:
    """Return each head's norm times the weight and the gate; in memory, the result's outermost axis is tokens."""
    y_BLHP, z_BLHP, weight, eps, sigmoid = inputs
    if weight.dim() == 1:
        normed_BLHP = rms_norm(RMSNormInputs(y_BLHP, weight, eps))
    else:
        normed_BLHP = rms_norm(RMSNormInputs(y_BLHP, torch.ones_like(weight[0]), eps)) * weight
    z_LBHP = z_BLHP.transpose(0, 1)
    gate_LBHP = torch.sigmoid(z_LBHP) if sigmoid else F.silu(z_LBHP)
    return (normed_BLHP.transpose(0, 1) * gate_LBHP).to(z_BLHP.dtype).transpose(0, 1)


SEPARATE = Implementation("separate", norm_before_gate)
