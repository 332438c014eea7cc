"""The short causal convolution before the recurrence of a state-space layer: every channel has its own W taps.

    y_t = bias + weight_0 x_{t-W+1} + ... + weight_{W-1} x_t,  then SiLU if `activation` is True

A tap that would read a token in another document reads zero instead. The tail is the last W - 1 inputs before the row;
they count as tokens in the row's first document. `next_tail` returns the tail for the next row: the last W - 1 inputs
in this row, with zeros in place of tokens that are not in the row's last document. Channels are not mixed, and taps are
not dilated.

Legend: B rows (sequences in the batch), L tokens per row, C channels, W width, T = W - 1 tail tokens, S = T + L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import wide_type


class ConvInputs(NamedTuple):
    """Inputs to the convolution: the rows x, and weights and bias of each channel.

    If `tail_BTC` is None, zeros precede the row. If `documents_BL` is None, every row is one document. `row_major` asks
    kernels for a contiguous y, so that a recurrence need not copy it; otherwise y may have x's memory order.
    """

    x_BLC: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None = None
    tail_BTC: Tensor | None = None
    documents_BL: Tensor | None = None
    activation: bool = False
    row_major: bool = False

    @property
    def width(self) -> int:
        return self.weight_CW.shape[1]


def causal_conv(inputs: ConvInputs) -> Tensor:
    """Return y in x's dtype."""
    x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation, _ = inputs
    wide = wide_type(x_BLC)
    width = inputs.width
    x_BSC = with_tail(x_BLC, tail_BTC, width).to(wide)
    if documents_BL is None:
        documents_BS = None
    else:
        documents_BS = documents_with_tail(documents_BL, width)
    y_BLC = x_BSC.new_zeros(x_BLC.shape)
    for tap in range(width):
        y_BLC = y_BLC + weight_CW[:, tap].to(wide) * reached(x_BSC, documents_BS, tap, width)
    if bias_C is not None:
        y_BLC = y_BLC + bias_C.to(wide)
    if activation:
        y_BLC = F.silu(y_BLC)
    return y_BLC.to(x_BLC.dtype)


def with_tail(x_BLC: Tensor, tail_BTC: Tensor | None, width: int) -> Tensor:
    """Return x (B, S, C) with the tail before the row; without a tail, zeros are before the row."""
    if tail_BTC is None:
        return F.pad(x_BLC, (0, 0, width - 1, 0))
    return torch.cat([tail_BTC.to(x_BLC.dtype), x_BLC], dim=1)


def documents_with_tail(documents_BL: Tensor, width: int) -> Tensor:
    """Return the document numbers (B, S) of tail and row; the tail belongs to the row's first document."""
    return torch.cat([documents_BL[:, :1].expand(-1, width - 1), documents_BL], dim=1)


def reached(x_BSC: Tensor, documents_BS: Tensor | None, tap: int, width: int) -> Tensor:
    """Return one tap's input (B, L, C): for each token, x of the token W - 1 - `tap` places before it.

    The input is 0 if the earlier token is in another document.
    """
    end = x_BSC.shape[1] - (width - 1) + tap
    x_BLC = x_BSC[:, tap:end]
    if documents_BS is None or tap == width - 1:
        return x_BLC
    other_BL = documents_BS[:, tap:end] != documents_BS[:, width - 1 :]
    return x_BLC.masked_fill(other_BL.unsqueeze(2), 0)


def next_tail(inputs: ConvInputs) -> Tensor:
    """Return the tail for the next row: the last W - 1 inputs, with 0 outside the row's last document.

    The result is a copy, since a view would keep the full row in memory.
    """
    x_BLC = inputs.x_BLC
    width = inputs.width
    documents_BL = inputs.documents_BL
    recent = slice(max(x_BLC.shape[1] - (width - 1), 0), None)
    x_BTC = with_tail(x_BLC[:, recent], inputs.tail_BTC, width)[:, -(width - 1) :]
    if documents_BL is None:
        return x_BTC.clone()
    documents_BT = documents_with_tail(documents_BL[:, recent], width)[:, -(width - 1) :]
    return x_BTC.masked_fill((documents_BT != documents_BL[:, -1:]).unsqueeze(2), 0)
