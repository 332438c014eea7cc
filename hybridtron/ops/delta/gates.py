"""Step sizes and log decays of the delta rule, from their logits: the op `delta_gates`.

    beta_t = reach sigmoid(b_t),   g_t = -exp(A_log) softplus(a_t + dt_bias)

Backward pass, where d before a name denotes its gradient and s is the logistic sigmoid:

    db_t = dbeta_t beta_t (1 - s(b_t)),   da_t = -dg_t exp(A_log) s(a_t + dt_bias)
    ddt_bias = sum over t of da_t,   dA_log = sum over t, and over a head's decays, of dg_t g_t

Legend: B rows (sequences in the batch), L tokens, H heads, G decays per head (N key channels, or 1), X = H G.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class DeltaGateInputs(NamedTuple):
    """Inputs to `delta_gates`.

    a        logits of the decays
    b        logits of the step sizes
    dt_bias  added to `a`
    A_log    logarithm of the factor by which a head's log decays are multiplied
    reach    largest step size
    """

    a_BLX: Tensor
    b_BLH: Tensor
    dt_bias_X: Tensor
    A_log_H: Tensor
    reach: float = 1.0


def delta_gates(inputs: DeltaGateInputs) -> tuple[Tensor, Tensor]:
    """Return beta (B, L, H) and g (B, L, H, G), in fp32 or float64.

    bf16 would be too coarse, because the recurrence sums the log decays of many tokens.
    """
    a_BLX, b_BLH, dt_bias_X, A_log_H, reach = inputs
    beta_BLH = reach * torch.sigmoid(at_least_fp32(b_BLH))
    steps_BLHG = F.softplus(at_least_fp32(a_BLX) + dt_bias_X).unflatten(-1, (len(A_log_H), -1))
    return beta_BLH, -torch.exp(at_least_fp32(A_log_H)).unsqueeze(-1) * steps_BLHG
