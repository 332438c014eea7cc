"""The delta rule with decays: a key's value is replaced instead of added to. Gated DeltaNet, Yang et al. 2024; KDA.

    s_t = diag(exp(g_t)) h_{t-1},   g_t <= 0
    u_t = beta_t (v_t - s_t^T k_t)
    h_t = s_t + k_t u_t^T,   y_t = h_t^T q_t

g has one entry for each key channel (KDA), or one for all of a head (Gated DeltaNet). Keys are expected to have length
1: then beta = 1 replaces the value stored for k_t by v_t, and any beta up to 2 keeps the state bounded. Where a new
document begins, nothing of the document before it remains.

Not here but in the mixers: projections, the normalization of q and k, how g and beta are computed, a scale of the
queries, and norms.

Legend: B rows, L tokens, H heads, N key size, P value size; G = N, or 1 where all keys of a head decay alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import state_before, wide_type


class DeltaInputs(NamedTuple):
    """A row's tokens and the state before it (None: zeros). Without documents the row is one stream."""

    q_BLHN: Tensor
    k_BLHN: Tensor
    v_BLHP: Tensor
    beta_BLH: Tensor
    g_BLHG: Tensor
    state_BHNP: Tensor | None = None
    documents_BL: Tensor | None = None


def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return y in the dtype of v, and the state after the last token in fp32 (float64 for float64 inputs)."""
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
    """Return the state before the row, in the dtype to compute in."""
    return state_before(inputs.state_BHNP, inputs.v_BLHP, *inputs.k_BLHN.shape[2:], inputs.v_BLHP.shape[3])
