"""State transitions: the linear map by which a row takes the state before it into the state after it.

Every recurrence here is affine in the state before a row:

    state after = transition(state before) + state after zeros

So the sequence shards of a row can be scanned apart, each from zeros, and joined by their transitions:

    state after both      = transition_2(state after zeros_1 + transition_1(state before)) + state after zeros_2
    transition over both  = transition_2 after transition_1

A transition depends on the decays alone, and for the delta rule on its keys and betas, but on no state and no output.
Gradients flow through it to the tensors that make the decays. Log decays are summed in float64, since a row may be
long. Document boundaries are left to the caller, which stops a state there.

The scan, SSD, the decay recurrence and gated linear attention multiply every entry by a factor; RWKV-6 has the
transition of gated linear attention, and retention that of the decay recurrence. The delta rule multiplies by a matrix
for each head, the product of diag(exp(g_t)) and I - beta_t k_t k_t^T over the row's tokens. This is the final state of
the op itself, run from the identity with zeros as values, by whichever implementation computes states.

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
    """A factor for each state entry (with size 1 on axes where entries share it), or a matrix for each head."""

    values: Tensor
    is_matrix: bool = False

    def apply(self, state: Tensor) -> Tensor:
        """Apply the transition to the state before the row (B, ...)."""
        if self.is_matrix:
            return self.values @ state
        return self.values * state


def scan_transition(inputs: ScanInputs) -> StateTransition:
    """Return the selective scan's transition: factors for states (B, E, N)."""
    sum_BE1 = _summed_steps(inputs.dt_BLE, inputs.dt_bias_E).unsqueeze(2)
    factor_BEN = (sum_BE1 * inputs.A_EN).exp().to(wide_type(inputs.x_BLE))
    return StateTransition(factor_BEN)


def ssd_transition(inputs: SSDInputs) -> StateTransition:
    """Return SSD's transition: factors for states (B, H, P, N)."""
    sum_BH = _summed_steps(inputs.dt_BLH, inputs.dt_bias_H)
    factor_BH = (sum_BH * inputs.A_H).exp().to(wide_type(inputs.x_BLHP))
    return StateTransition(factor_BH[:, :, None, None])


def decay_transition(inputs: DecayInputs) -> StateTransition:
    """Return the decay recurrence's transition: factors for states (B, H, P, N)."""
    factor_BH = inputs.g_BLH.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return StateTransition(factor_BH[:, :, None, None])


def gla_transition(inputs: GLAInputs) -> StateTransition:
    """Return gated linear attention's transition: factors for states (B, H, N, P)."""
    factor_BHN = inputs.g_BLHN.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return StateTransition(factor_BHN.unsqueeze(3))


def delta_transition(inputs: DeltaInputs) -> StateTransition:
    """Return the delta rule's transition: matrices for states (B, H, N, P); column n is key channel n's image."""
    size = inputs.k_BLHN.shape[3]
    wide = wide_type(inputs.v_BLHP)
    identity_NN = torch.eye(size, dtype=wide, device=inputs.k_BLHN.device)
    start_BHNN = identity_NN.expand(inputs.k_BLHN.shape[0], inputs.k_BLHN.shape[2], size, size)
    nothing_BLHN = torch.zeros_like(inputs.k_BLHN, dtype=inputs.v_BLHP.dtype)
    _, matrix_BHNN = delta_scan(inputs._replace(q_BLHN=nothing_BLHN, v_BLHP=nothing_BLHN, state_BHNP=start_BHNN))
    return StateTransition(matrix_BHNN, is_matrix=True)


def _summed_steps(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """Sum the step sizes over tokens, in float64; backward computes them again instead of saving them.

    `summed` takes its tensors as arguments: inside a recomputed sub-layer, a closure would keep them alive.
    """

    def summed(dt: Tensor, dt_bias: Tensor) -> Tensor:
        return step_sizes(dt, dt_bias).sum(1, dtype=torch.float64)

    if not torch.is_grad_enabled():
        return summed(dt, dt_bias)
    return checkpoint(summed, dt, dt_bias, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
