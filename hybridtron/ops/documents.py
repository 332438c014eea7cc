"""Where documents begin in rows that hold several.

Legend: B rows, L tokens, E borders.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_starts(documents_BL: Tensor | None) -> Tensor | None:
    """Which tokens begin a document inside their row; a row's first token continues what came before the row."""
    if documents_BL is None:
        return None
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)


def document_borders(documents_BL: Tensor) -> Tensor:
    """Where documents begin in the rows laid end to end, and where the last row ends, as int32.

    How many there are the device knows alone: of a tensor on a GPU the host waits for it.
    """
    begins_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=True)
    return F.pad(begins_BL.flatten().nonzero().flatten(), (0, 1), value=documents_BL.numel()).to(torch.int32)
