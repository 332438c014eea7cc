"""Gated linear attention (Yang et al. 2024): a recurrence with one decay for each key channel.

    h_t = diag(exp(g_t)) h_{t-1} + k_t v_t^T,   y_t = h_t^T q_t,   g_t <= 0

h_t is the state after token t; q, k and v are queries, keys and values; g has the log decays. If g is equal for all key
channels in a head, this is the recurrence of SSD (`ops/ssd`). If g is also constant over tokens, it is the recurrence
of RetNet.

In RWKV-6, token t + 1 reads the state h_t with its own query. RWKV-6's sub-layer therefore passes the query of token
t + 1 as q_t. y_t is then a term in the output of token t + 1.

If a document begins within a row, the state is set to zero before the document's first token. The row's first token
never resets the state, since it may continue the document of the initial state.

The sub-layers that use this op compute everything else: projections, g, q's scale, and norms.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import state_or_zeros, wide_type


class GLAInputs(NamedTuple):
    """Rows of tokens, the state before each row, and each token's document index.

    If `state_BHNP` is None, the state before each row is zero. If `documents_BL` is None, every row is one document.
    """

    q_BLHN: Tensor
    k_BLHN: Tensor
    v_BLHP: Tensor
    g_BLHN: Tensor
    state_BHNP: Tensor | None = None
    documents_BL: Tensor | None = None


def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    """Return y in v's dtype, and the state after the row in fp32 (float64 for float64 inputs)."""
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
    """Return the state before the row in fp32 (float64 for float64 inputs); zeros if `state_BHNP` is None."""
    return state_or_zeros(inputs.state_BHNP, inputs.v_BLHP, *inputs.k_BLHN.shape[2:], inputs.v_BLHP.shape[3])
