"""The recurrence with one log-decay for each key channel: gated linear attention, Yang et al. 2024.

    h_t = diag(exp(g_t)) h_{t-1} + k_t v_t^T,   y_t = h_t^T q_t,   g_t <= 0

With the same g for all key channels of a head it is the core of SSD (`ssd/decay`), and if g is also constant, retention
(RetNet). A mixer that reads the state before a token's own step (RWKV-6) passes the queries of the next tokens. Where a
new document begins, nothing of the document before it remains.

Not here but in the mixers: projections, how g is computed, a scale of the queries, and norms.

Legend: B rows, L tokens, H heads, N key size, P value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import state_before, wide_type


class GLAInputs(NamedTuple):
    """A row's tokens and the state before it (None: zeros). Without documents the row is one stream."""

    q_BLHN: Tensor
    k_BLHN: Tensor
    v_BLHP: Tensor
    g_BLHN: Tensor
    state_BHNP: Tensor | None = None
    documents_BL: Tensor | None = None


def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    """Return y in the dtype of v, and the state after the last token in fp32 (float64 for float64 inputs)."""
    wide = wide_type(inputs.v_BLHP)
    q, k, v, g = (t.to(wide) for t in inputs[:4])
    h_BHNP = initial_state(inputs)
    starts_BL = document_starts(inputs.documents_BL)
    outputs = []
    for t in range(v.shape[1]):
        if starts_BL is not None:
            h_BHNP = h_BHNP.masked_fill(starts_BL[:, t, None, None, None], 0)
        h_BHNP = g[:, t].exp().unsqueeze(3) * h_BHNP + k[:, t].unsqueeze(3) * v[:, t].unsqueeze(2)
        outputs.append((q[:, t].unsqueeze(3) * h_BHNP).sum(2))
    return (torch.stack(outputs, dim=1) if outputs else v).to(inputs.v_BLHP.dtype), h_BHNP


def initial_state(inputs: GLAInputs) -> Tensor:
    """Return the state before the row, in the dtype to compute in."""
    return state_before(inputs.state_BHNP, inputs.v_BLHP, *inputs.k_BLHN.shape[2:], inputs.v_BLHP.shape[3])
