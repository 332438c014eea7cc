"""Where documents begin in rows that hold several.

Legend: B rows, L tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def document_starts(documents_BL: Tensor | None) -> Tensor | None:
    """Which tokens begin a document inside their row; a row's first token continues what came before the row."""
    if documents_BL is None:
        return None
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)
