"""Log decays of gated linear attention, from their logits: the op `gla_gates`.

    g_t = log(sigmoid(a_t + bias)) / divisor

Backward pass, where d before a name denotes its gradient and s is the logistic sigmoid:

    da_t = dg_t s(-(a_t + bias)) / divisor,   dbias = sum over t of da_t

Legend: B rows (sequences in the batch), L tokens, K key channels of all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class GLAGateInputs(NamedTuple):
    """Inputs to `gla_gates`: logits `a`, a bias for each key channel, and the divisor of the log decays."""

    a_BLK: Tensor
    bias_K: Tensor
    divisor: float


def gla_gates(inputs: GLAGateInputs) -> Tensor:
    """Return g (B, L, K) in fp32 or float64.

    bf16 would be too coarse, because the recurrence sums the log decays of many tokens.
    """
    return F.logsigmoid(at_least_fp32(inputs.a_BLK) + inputs.bias_K) / inputs.divisor
