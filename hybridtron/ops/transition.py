"""State transitions of recurrences. They make it possible to scan the shards of a sequence in parallel.

A recurrence maps the initial state h of a sequence to its final state. This map is affine: a linear map of h (the
transition), plus a constant z. z is the final state that the sequence reaches from a zero state:

    final(h) = transition(h) + z

With context parallelism, each rank scans its shard of the sequence from a zero state. Two consecutive shards, 1 and 2,
are then joined:

    final(h) over both shards    = transition_2(transition_1(h) + z_1) + z_2
    transition over both shards  = transition_2 applied after transition_1

A transition depends on the decays, and for the delta rule also on keys and betas. It does not depend on states,
queries or values. Gradients flow through it to the tensors from which the decays are computed. Log decays are summed in
float64, since a sequence may be long. Transitions ignore document boundaries: the caller must not pass a state across a
boundary.

The transitions of the ops:

    selective scan, SSD, decay recurrence, gated linear attention   a factor for every state entry
    delta rule                                                      a matrix for every head

Retention uses the decay recurrence; RWKV-6 uses gated linear attention. The delta rule's matrix is a product of one
factor per token; the factors of later tokens are on the left. The factor of token t is
(I - beta_t k_t k_t^T) diag(exp(g_t)), with the token's key k_t, update strength beta_t and log decays g_t. The op
`delta_scan` computes this matrix: its final state is the matrix if its initial state is the identity and all values are
zero.

Legend: B sequences in a batch, L tokens, H heads, E inner channels of the selective scan, N state size per channel (or
key size), P head size (or value size).
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
    """A factor for each state entry, or a matrix for each head.

    Factors have size 1 on the axes along which all entries share a factor.
    """

    values: Tensor
    is_matrix: bool = False

    def apply(self, state: Tensor) -> Tensor:
        """Return the contribution of an initial state (B, ...) to the final state."""
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
    """Return the delta rule's transition: matrices (B, H, N, N) that multiply states (B, H, N, P) from the left."""
    size = inputs.k_BLHN.shape[3]
    wide = wide_type(inputs.v_BLHP)
    identity_NN = torch.eye(size, dtype=wide, device=inputs.k_BLHN.device)
    start_BHNN = identity_NN.expand(inputs.k_BLHN.shape[0], inputs.k_BLHN.shape[2], size, size)
    nothing_BLHN = torch.zeros_like(inputs.k_BLHN, dtype=inputs.v_BLHP.dtype)
    _, matrix_BHNN = delta_scan(inputs._replace(q_BLHN=nothing_BLHN, v_BLHP=nothing_BLHN, state_BHNP=start_BHNN))
    return StateTransition(matrix_BHNN, is_matrix=True)


def _summed_steps(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the sum of the step sizes over tokens, in float64.

    The backward pass recomputes the step sizes, so they are not saved. `summed` takes its tensors as arguments. A
    closure would keep the tensors alive even in a sub-layer whose activations are recomputed.
    """

    def summed(dt: Tensor, dt_bias: Tensor) -> Tensor:
        return step_sizes(dt, dt_bias).sum(1, dtype=torch.float64)

    if not torch.is_grad_enabled():
        return summed(dt, dt_bias)
    return checkpoint(summed, dt, dt_bias, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
