"""The delta rule with decays: a token replaces the value that is stored for its key, instead of adding to this value.

    s_t = diag(exp(g_t)) h_{t-1},   g_t <= 0
    u_t = beta_t (v_t - s_t^T k_t)
    h_t = s_t + k_t u_t^T,   y_t = h_t^T q_t

h_t is the state after token t, and s_t is the decayed state before token t. The log decays g have one entry per key
channel (Kimi Delta Attention, KDA) or one entry per head (Gated DeltaNet, Yang et al. 2024).

s_t^T k_t is the value that the state stores for the key k_t, and u_t is added to this value. The caller normalizes keys
to length 1. Then beta = 1 replaces the stored value by v_t. For beta from 0 to 2 the factor I - beta k_t k_t^T never
enlarges the state, since its eigenvalues are 1 and 1 - beta. Where a new document begins, the state is set to zero
before the first token.

The mixers (sub-layers that use this op) compute everything else: projections, g, beta, the normalization of q and k,
q's scale, and norms.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, G = N or 1 (a
decay per key channel or per head).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import state_or_zeros, wide_type


class DeltaInputs(NamedTuple):
    """Rows of tokens, and the state before each row.

    If `state_BHNP` is None, the state is zero. If `documents_BL` is None, every row is one document.
    """

    q_BLHN: Tensor
    k_BLHN: Tensor
    v_BLHP: Tensor
    beta_BLH: Tensor
    g_BLHG: Tensor
    state_BHNP: Tensor | None = None
    documents_BL: Tensor | None = None


def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return y in v's dtype, and the state after the row in fp32 (float64 for float64 inputs)."""
    wide = wide_type(inputs.v_BLHP)
    q, k, v, beta, g = (t.to(wide) for t in inputs[:5])
    h_BHNP = initial_state(inputs)
    starts_BL = document_starts(inputs.documents_BL)
    outputs = []
    for t in range(v.shape[1]):
        if starts_BL is not None:
            h_BHNP = h_BHNP.masked_fill(starts_BL[:, t, None, None, None], 0)
        h_BHNP = g[:, t].exp().unsqueeze(3) * h_BHNP
        retrieved_BHP = (k[:, t].unsqueeze(3) * h_BHNP).sum(2)
        written_BHP = beta[:, t].unsqueeze(2) * (v[:, t] - retrieved_BHP)
        h_BHNP = h_BHNP + k[:, t].unsqueeze(3) * written_BHP.unsqueeze(2)
        outputs.append((q[:, t].unsqueeze(3) * h_BHNP).sum(2))
    return (torch.stack(outputs, dim=1) if outputs else v).to(inputs.v_BLHP.dtype), h_BHNP


def initial_state(inputs: DeltaInputs) -> Tensor:
    """Return the state before the row in fp32 (float64 for float64 inputs); zeros if `state_BHNP` is None."""
    return state_or_zeros(inputs.state_BHNP, inputs.v_BLHP, *inputs.k_BLHN.shape[2:], inputs.v_BLHP.shape[3])
