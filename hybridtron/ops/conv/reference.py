"""The short causal convolution before a state space layer: every channel has its own W taps.

    y_t = bias + weight_0 x_{t-W+1} + ... + weight_{W-1} x_t,  then SiLU if asked for

Taps that would reach into another document read zero. The tail (the last W - 1 inputs of the row before) belongs to
the row's first document; the new tail holds inputs of the row's last document only, and zeros before it.
Not here: long or dilated convolutions, and mixing of channels.

Legend: B rows, L tokens, C channels, W width of the convolution, T = W - 1 tokens of tail, S = T + L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import wide_type


class ConvInputs(NamedTuple):
    """A row and its taps. Without a tail zeros precede the row; without documents the row is one stream."""

    x_BLC: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None = None
    tail_BTC: Tensor | None = None
    documents_BL: Tensor | None = None
    activation: bool = False

    @property
    def width(self) -> int:
        return self.weight_CW.shape[1]


def causal_conv(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """Return y in the dtype of x, and the tail for the next row."""
    x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation = inputs
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
    return y_BLC.to(x_BLC.dtype), new_tail(inputs)


def with_tail(x_BLC: Tensor, tail_BTC: Tensor | None, width: int) -> Tensor:
    """Return the row with the tail before it, or with zeros if there is none."""
    if tail_BTC is None:
        return F.pad(x_BLC, (0, 0, width - 1, 0))
    return torch.cat([tail_BTC.to(x_BLC.dtype), x_BLC], dim=1)


def documents_with_tail(documents_BL: Tensor, width: int) -> Tensor:
    """Return the documents of tail and row; the tail belongs to the row's first document."""
    return torch.cat([documents_BL[:, :1].expand(-1, width - 1), documents_BL], dim=1)


def reached(x_BSC: Tensor, documents_BS: Tensor | None, tap: int, width: int) -> Tensor:
    """Return a tap's input for each token: x from W - 1 - tap tokens before, or zero from another document."""
    end = x_BSC.shape[1] - (width - 1) + tap
    x_BLC = x_BSC[:, tap:end]
    if documents_BS is None or tap == width - 1:
        return x_BLC
    other_BL = documents_BS[:, tap:end] != documents_BS[:, width - 1 :]
    return x_BLC.masked_fill(other_BL.unsqueeze(2), 0)


def new_tail(inputs: ConvInputs) -> Tensor:
    """Return the last W - 1 inputs, with zeros for those of other documents than the row's last.

    They are a copy: a view would keep the full row in memory.
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
