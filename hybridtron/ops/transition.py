"""State transitions: the linear map by which a row takes the state before it into the state after it.

Every recurrence here is affine in the state before a row:

    state after = transition(state before) + state after zeros

So the shards of a row can be read apart, each from zeros, and joined by their transitions:

    state after both      = transition_2(state after zeros_1 + transition_1(state before)) + state after zeros_2
    transition over both  = transition_2 after transition_1

A transition is a function of the decays alone, and its gradients reach the tensors that make the decays. Log decays are
added up in float64, since a row may be long. The caller stops a state at a document's boundary: a transition knows of
none.

The scan, SSD, the decay recurrence and gated linear attention multiply every entry by a factor; RWKV-6 has the
transition of gated linear attention, and retention that of the decay recurrence. The delta rule multiplies by a matrix
for each head, the product of diag(exp(g_t)) and I - beta_t k_t k_t^T over the row's tokens: the state after values of
zeros from the identity, by whichever form of the op computes states.

Legend: as in the ops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.gla import GLAInputs
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan import ScanInputs
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.ssd import DecayInputs, SSDInputs


class StateTransition(NamedTuple):
    """A factor for every entry of the state (sizes of 1 where entries share one), or a matrix for every head."""

    values: Tensor
    is_matrix: bool = False

    def apply(self, state: Tensor) -> Tensor:
        """Return the part of the state after the row that comes from the state before it (B, ...)."""
        return self.values @ state if self.is_matrix else self.values * state


def scan_transition(inputs: ScanInputs) -> StateTransition:
    """Return the factors of a state (B, E, N)."""
    sum_BE1 = _summed_steps(inputs.dt_BLE, inputs.dt_bias_E).unsqueeze(2)
    factor_BEN = (sum_BE1 * inputs.A_EN).exp().to(wide_type(inputs.x_BLE))
    return StateTransition(factor_BEN)


def ssd_transition(inputs: SSDInputs) -> StateTransition:
    """Return the factors of a state (B, H, P, N)."""
    sum_BH = _summed_steps(inputs.dt_BLH, inputs.dt_bias_H)
    factor_BH = (sum_BH * inputs.A_H).exp().to(wide_type(inputs.x_BLHP))
    return StateTransition(factor_BH[:, :, None, None])


def decay_transition(inputs: DecayInputs) -> StateTransition:
    """Return the factors of a state (B, H, P, N)."""
    factor_BH = inputs.g_BLH.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return StateTransition(factor_BH[:, :, None, None])


def gla_transition(inputs: GLAInputs) -> StateTransition:
    """Return the factors of a state (B, H, N, P)."""
    factor_BHN = inputs.g_BLHN.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return StateTransition(factor_BHN.unsqueeze(3))


def delta_transition(inputs: DeltaInputs) -> StateTransition:
    """Return the matrices of a state (B, H, N, P), whose columns say what is left of the key channels."""
    size, wide = inputs.k_BLHN.shape[3], wide_type(inputs.v_BLHP)
    identity_NN = torch.eye(size, dtype=wide, device=inputs.k_BLHN.device)
    start_BHNN = identity_NN.expand(inputs.k_BLHN.shape[0], inputs.k_BLHN.shape[2], size, size)
    nothing_BLHN = torch.zeros_like(inputs.k_BLHN, dtype=inputs.v_BLHP.dtype)
    _, matrix_BHNN = delta_scan(inputs._replace(q_BLHN=nothing_BLHN, v_BLHP=nothing_BLHN, state_BHNP=start_BHNN))
    return StateTransition(matrix_BHNN, is_matrix=True)


def _summed_steps(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """Sum the step sizes over tokens; the backward pass computes them again instead of keeping them.

    Their inputs are arguments, because inside a recomputed sub-layer a closure would keep them all the same.
    """

    def summed(dt: Tensor, dt_bias: Tensor) -> Tensor:
        return step_sizes(dt, dt_bias).sum(1, dtype=torch.float64)

    if not torch.is_grad_enabled():
        return summed(dt, dt_bias)
    return checkpoint(summed, dt, dt_bias, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
