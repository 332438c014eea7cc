"""Mamba-1's selective scan (S6): Gu and Dao 2023, section 3.

    delta_t = softplus(dt_t + dt_bias)
    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t
    y_t = (C_t h_t + D x_t) * silu(z_t)

h is the state, x is the input, and z is the gate. Where a new document begins, h_{t-1} is replaced by 0. Then no value
and no gradient crosses the boundary, even if the state is infinite or NaN. (A decay of 0 would not suffice, since 0
times infinity is NaN.) The projections and the convolution around the scan are in `hybridtron/mixers`.

Legend: B rows (sequences in a batch), L tokens, E inner channels, N state entries per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import state_or_zeros, wide_type


class ScanInputs(NamedTuple):
    """Per-token tensors, parameters, and the state before the row (None for zeros).

    If `documents_BL` is None, a row is one document. If `z_BLE` is None, there is no gate: the factor silu(z) is 1.
    """

    x_BLE: Tensor
    dt_BLE: Tensor
    A_EN: Tensor
    B_BLN: Tensor
    C_BLN: Tensor
    D_E: Tensor
    dt_bias_E: Tensor
    z_BLE: Tensor | None = None
    state_BEN: Tensor | None = None
    documents_BL: Tensor | None = None


def selective_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return y in x's dtype, and the state after the last token in fp32 (float64 for float64 inputs)."""
    wide = wide_type(inputs.x_BLE)
    A_EN = inputs.A_EN
    x = inputs.x_BLE.to(wide)
    B = inputs.B_BLN.to(wide)
    C = inputs.C_BLN.to(wide)
    delta = step_sizes(inputs.dt_BLE, inputs.dt_bias_E)
    h_BEN = initial_state(inputs)
    starts_BL = document_starts(inputs.documents_BL)
    outputs = []
    for t in range(x.shape[1]):
        decay_BEN = torch.exp(delta[:, t, :, None] * A_EN)
        if starts_BL is not None:
            h_BEN = h_BEN.masked_fill(starts_BL[:, t, None, None], 0)
        h_BEN = decay_BEN * h_BEN + (delta[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        outputs.append((h_BEN * C[:, t, None, :]).sum(-1) + inputs.D_E * x[:, t])
    y_BLE = torch.stack(outputs, dim=1) if outputs else x
    if inputs.z_BLE is not None:
        y_BLE = y_BLE * F.silu(inputs.z_BLE.to(wide))
    return y_BLE.to(inputs.x_BLE.dtype), h_BEN


def step_sizes(dt_BLE: Tensor, dt_bias_E: Tensor) -> Tensor:
    """Return delta = softplus(dt + dt_bias), in fp32 or float64."""
    wide = wide_type(dt_BLE)
    return F.softplus(dt_BLE.to(wide) + dt_bias_E.to(wide))


def initial_state(inputs: ScanInputs) -> Tensor:
    """Return the state before the row in fp32 (float64 for float64 inputs); zeros if `state_BEN` is None."""
    return state_or_zeros(inputs.state_BEN, inputs.x_BLE, *inputs.A_EN.shape)
