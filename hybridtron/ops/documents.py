"""Document boundaries in rows that hold several documents.

Legend: B rows, L tokens, E boundaries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_starts(documents_BL: Tensor | None) -> Tensor | None:
    """Mark the tokens that begin a document inside their row; return None if `documents_BL` is None.

    A row's first token is never marked, since it may continue the row before.
    """
    if documents_BL is None:
        return None
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)


def document_boundaries(documents_BL: Tensor) -> Tensor:
    """Return the first token of each document in the rows laid end to end, then the last row's end, as int32.

    Only the device knows their number, so for a tensor on a GPU the host waits.
    """
    begins_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=True)
    return F.pad(begins_BL.flatten().nonzero().flatten(), (0, 1), value=documents_BL.numel()).to(torch.int32)
