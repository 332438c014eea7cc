"""Token shift for RWKV's mixers."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.ops.documents import document_starts
from hybridtron.parallel.context import tokens_before


def token_before(x_LBD: Tensor, last_BD: Tensor | None, seq: SeqInfo) -> tuple[Tensor, Tensor]:
    """Return each token's predecessor in its document, zeros for a document's first token; and the row's last token.

    `last_BD` is the last token of the previous row. Under sequence parallelism call this after `enter`, since the
    predecessor of a rank's first token is on another rank.
    """
    if last_BD is None:
        carried_B1D = None
    else:
        carried_B1D = last_BD.to(x_LBD.dtype).unsqueeze(1)
    first_B1D = tokens_before(x_LBD.transpose(0, 1), 1, carried_B1D, seq)
    if first_B1D is None:
        first_1BD = torch.zeros_like(x_LBD[:1])
    else:
        first_1BD = first_B1D.transpose(0, 1)
    before_LBD = torch.cat((first_1BD, x_LBD[:-1]))
    if (starts_BL := document_starts(seq.documents_BL)) is not None:
        before_LBD = before_LBD.masked_fill(starts_BL.T.unsqueeze(2), 0)
    return before_LBD, x_LBD[-1].clone()  # a view would keep the whole row in memory
