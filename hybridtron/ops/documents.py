"""Document boundaries in packed rows. A packed row is a sequence that holds several documents.

`documents_BL` holds each token's document index. Indices increase along a row. Legend: B rows, L tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_starts(documents_BL: Tensor | None) -> Tensor | None:
    """Return a mask of the tokens that begin a document; return None if `documents_BL` is None.

    A row's first token is never marked, since it may continue a document from the previous row.
    """
    if documents_BL is None:
        return None
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)


def document_boundaries(documents_BL: Tensor) -> Tensor:
    """Return the cumulative document lengths in int32: the index of each document's first token, then B * L.

    Indices count the tokens in the flattened batch. Every row's first token counts as a document's start. The number
    of documents depends on the tensor's values, so for a tensor on a GPU the host waits for the device.
    """
    begins_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=True)
    return F.pad(begins_BL.flatten().nonzero().flatten(), (0, 1), value=documents_BL.numel()).to(torch.int32)
