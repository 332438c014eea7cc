"""The scan of Mamba-2 (SSD, state space duality): Dao and Gu 2024.

    delta_t = softplus(dt_t + dt_bias)
    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T          one number A and one delta for each head
    y_t = h_t C_t + D x_t

Heads of a group share B and C: head h belongs to group h // (H / G). Where a new document begins, nothing of the
document before it remains.

Not here: projections, convolution and gated norm (mixers), and limits of delta, which no published model sets.

Legend: B rows, L tokens, H heads, P head size, G groups, N state size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan.reference import step_sizes


class SSDInputs(NamedTuple):
    """Tokens, parameters, and the state before the row, zeros if None; without documents a row is one stream."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    state_BHPN: Tensor | None = None
    documents_BL: Tensor | None = None


def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the state after the last token in fp32 (float64 for float64 inputs)."""
    x_BLHP, A_H, B_BLGN = inputs.x_BLHP, inputs.A_H, inputs.B_BLGN
    wide, heads_of_group = wide_type(x_BLHP), x_BLHP.shape[2] // B_BLGN.shape[2]
    x, delta_BLH = x_BLHP.to(wide), step_sizes(inputs.dt_BLH, inputs.dt_bias_H).to(wide)
    B_BLHN, C_BLHN = (t.to(wide).repeat_interleave(heads_of_group, dim=2) for t in (B_BLGN, inputs.C_BLGN))
    h_BHPN, starts_BL = initial_state(inputs), document_starts(inputs.documents_BL)
    outputs = []
    for t in range(x.shape[1]):
        if starts_BL is not None:
            h_BHPN = h_BHPN.masked_fill(starts_BL[:, t, None, None, None], 0)
        decay_BH = torch.exp(delta_BLH[:, t] * A_H)
        step_BHP = delta_BLH[:, t, :, None] * x[:, t]
        h_BHPN = decay_BH[:, :, None, None] * h_BHPN + step_BHP.unsqueeze(3) * B_BLHN[:, t].unsqueeze(2)
        outputs.append((h_BHPN * C_BLHN[:, t].unsqueeze(2)).sum(-1) + inputs.D_H[:, None] * x[:, t])
    return torch.stack(outputs, dim=1).to(x_BLHP.dtype), h_BHPN


def initial_state(inputs: SSDInputs) -> Tensor:
    """The state before the row in the wide type, zeros where there is none."""
    x_BLHP, wide = inputs.x_BLHP, wide_type(inputs.x_BLHP)
    if inputs.state_BHPN is None:
        rows, _, heads, size = x_BLHP.shape
        return x_BLHP.new_zeros(rows, heads, size, inputs.B_BLGN.shape[3], dtype=wide)
    return inputs.state_BHPN.to(wide)
