"""Interpolation between each token and its predecessor (token shift), in several streams.

    y_st = x_t + (x_{t-1} - x_t) w_st,   w_st = mix_s + change_st

The predecessor of a document's first token is zero. The predecessor of a row's first token is an input, or zero. In the
equations for the backward pass, d before a name denotes a gradient. The terms of token t + 1 are 0 if another document
begins there:

    dx_t = sum over s of dy_st (1 - w_st) + dy_s,t+1 w_s,t+1
    dchange_st = dy_st (x_{t-1} - x_t),   dmix_s = sum over t of dchange_st

Legend: S streams, L tokens, B rows (sequences in the batch), D channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import at_least_fp32


class TokenMixInputs(NamedTuple):
    """Inputs to `token_mix`.

    x           tokens
    mix         each stream's interpolation weights
    change      additions to these weights for every token; None stands for zeros
    first       the predecessors of the rows' first tokens; None stands for zeros
    documents   each token's document number; None if each row is one document
    """

    x_LBD: Tensor
    mix_SD: Tensor
    change_SLBD: Tensor | None = None
    first_BD: Tensor | None = None
    documents_BL: Tensor | None = None


def token_mix(inputs: TokenMixInputs) -> tuple[Tensor, ...]:
    """Return every stream (L, B, D), in x's dtype."""
    x_LBD = at_least_fp32(inputs.x_LBD)
    first_BD = None if inputs.first_BD is None else inputs.first_BD.to(x_LBD.dtype)
    before_LBD = predecessors(x_LBD, first_BD, inputs.documents_BL)
    mix_SLBD = at_least_fp32(inputs.mix_SD)[:, None, None]
    if inputs.change_SLBD is not None:
        mix_SLBD = mix_SLBD + at_least_fp32(inputs.change_SLBD)
    return tuple((x_LBD + (before_LBD - x_LBD) * mix_LBD).to(inputs.x_LBD.dtype) for mix_LBD in mix_SLBD)


def predecessors(x_LBD: Tensor, first_BD: Tensor | None, documents_BL: Tensor | None) -> Tensor:
    """Return each token's predecessor in its document."""
    first_1BD = torch.zeros_like(x_LBD[:1]) if first_BD is None else first_BD.unsqueeze(0)
    before_LBD = torch.cat((first_1BD, x_LBD[:-1]))
    if (starts_BL := document_starts(documents_BL)) is not None:
        before_LBD = before_LBD.masked_fill(starts_BL.T.unsqueeze(2), 0)
    return before_LBD
