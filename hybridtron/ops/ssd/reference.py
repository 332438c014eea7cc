"""Mamba-2's scan (SSD, state space duality), and its recurrence with given decays: Dao and Gu 2024.

    ssd_scan:    delta_t = softplus(dt_t + dt_bias)
                 h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T          one number A and one delta for each head
                 y_t = h_t C_t + D x_t

    decay_scan:  h_t = exp(g_t) h_{t-1} + step_t v_t k_t^T                     g_t <= 0
                 y_t = (exp(g_t) h_{t-1} + own_step_t v_t k_t^T) q_t + D v_t

h is the state (P, N) of a head. In `ssd_scan` delta is both the step and the decay's exponent. `decay_scan` is for
mixers in which the two are independent, as in Mamba-3. There the outputs of later tokens see a token with the factor
`step`, while the token's own output sees it with the factor `own_step`. The heads of a group share B and C, or k and q:
head h belongs to group h // (H / G). Where a new document begins, the state is set to zero before the first token.

The projections, the convolution and the gated norm around the scan are in `hybridtron/mixers`. Mamba-2's code has
optional limits for delta. They are left out here, since no published model sets them.

Legend: B rows (sequences in a batch), L tokens, H heads, P head size, G groups, N state size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import state_or_zeros, wide_type
from hybridtron.ops.scan.reference import step_sizes


class SSDInputs(NamedTuple):
    """Per-token tensors, parameters, and the state before the row (None for zeros).

    If `documents_BL` is None, a row is one document.
    """

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    state_BHPN: Tensor | None = None
    documents_BL: Tensor | None = None


class DecayInputs(NamedTuple):
    """Per-token tensors, the state before the row (None for zeros), and D (None for zeros).

    `g` is the log decay of each head. Either `step` and `own_step` are both given, or both are None and count as 1. If
    `documents_BL` is None, a row is one document.
    """

    q_BLGN: Tensor
    k_BLGN: Tensor
    v_BLHP: Tensor
    g_BLH: Tensor
    state_BHPN: Tensor | None = None
    documents_BL: Tensor | None = None
    step_BLH: Tensor | None = None
    own_step_BLH: Tensor | None = None
    D_H: Tensor | None = None


def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return y in x's dtype, and the state after the last token in fp32 (float64 for float64 inputs)."""
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    wide = wide_type(x_BLHP)
    x = x_BLHP.to(wide)
    delta_BLH = step_sizes(dt_BLH, dt_bias_H).to(wide)
    steps_BLHP = delta_BLH.unsqueeze(3) * x
    g_BLH = delta_BLH * A_H
    y_BLHP, last_BHPN = decay_scan(DecayInputs(C_BLGN, B_BLGN, steps_BLHP, g_BLH, state_BHPN, documents_BL))
    return (y_BLHP + D_H.unsqueeze(1) * x).to(x_BLHP.dtype), last_BHPN


def decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    """Return y in v's dtype, and the state after the last token in fp32 (float64 for float64 inputs)."""
    q_BLGN, k_BLGN, v_BLHP, g_BLH, state_BHPN, documents_BL, step_BLH, own_step_BLH, D_H = inputs
    wide = wide_type(v_BLHP)
    v = v_BLHP.to(wide)
    later_BLHP = v if step_BLH is None else step_BLH.unsqueeze(3) * v
    if own_step_BLH is None:
        itself_BLHP = v
    else:
        itself_BLHP = own_step_BLH.unsqueeze(3) * v
    heads_of_group = v.shape[2] // k_BLGN.shape[2]
    q = q_BLGN.to(wide).repeat_interleave(heads_of_group, dim=2)
    k = k_BLGN.to(wide).repeat_interleave(heads_of_group, dim=2)
    decay_BLH = torch.exp(g_BLH.to(wide))
    h_BHPN = initial_state(v_BLHP, k_BLGN, state_BHPN)
    starts_BL = document_starts(documents_BL)
    outputs = []
    for t in range(v.shape[1]):
        if starts_BL is not None:
            h_BHPN = h_BHPN.masked_fill(starts_BL[:, t, None, None, None], 0)
        decayed_BHPN = decay_BLH[:, t, :, None, None] * h_BHPN
        seen_BHPN = decayed_BHPN + itself_BLHP[:, t].unsqueeze(3) * k[:, t].unsqueeze(2)
        h_BHPN = seen_BHPN
        if itself_BLHP is not later_BLHP:
            h_BHPN = decayed_BHPN + later_BLHP[:, t].unsqueeze(3) * k[:, t].unsqueeze(2)
        outputs.append((seen_BHPN * q[:, t].unsqueeze(2)).sum(-1))
    y_BLHP = torch.stack(outputs, dim=1) if outputs else v
    return (y_BLHP if D_H is None else y_BLHP + D_H.unsqueeze(1) * v).to(v_BLHP.dtype), h_BHPN


def initial_state(x_BLHP: Tensor, B_BLGN: Tensor, state_BHPN: Tensor | None) -> Tensor:
    """Return the state before the row in fp32 (float64 for float64 inputs); zeros if `state_BHPN` is None."""
    return state_or_zeros(state_BHPN, x_BLHP, *x_BLHP.shape[2:], B_BLGN.shape[3])
