"""The angles of a row by matrix products with masks: over the tokens of a block, then over the blocks before it.

    turn_t  = step_t rate_t
    theta_t = sum of turns of t's document in its block up to t + carry of the block, if the document began before it
    carry   = sum of the same document's turns in all blocks before, modulo 2 pi

Differences of sums over the row would leave other documents' rounding errors in a document's angles. Sums inside a
block are in fp32 and amount to few rotations; sums over blocks are in float64.

Legend: as in `reference`; K blocks of T tokens, C = H S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.turns.reference import FULL_TURN, AngleInputs

BLOCK = 32  # tokens


def angles(inputs: AngleInputs) -> Tensor:
    steps_BLH, rates_BLS, documents_BL = inputs
    rows, length, heads = steps_BLH.shape
    wide = wide_type(steps_BLH)
    missing = -length % BLOCK
    turns_BLHS = steps_BLH.to(wide).unsqueeze(3) * rates_BLS.to(wide).unsqueeze(2)
    turns_BKTC = F.pad(turns_BLHS.flatten(2), (0, 0, 0, missing)).unflatten(1, (-1, BLOCK))
    document_BKT = _counted(documents_BL, rows, length, steps_BLH.device).unflatten(1, (-1, BLOCK))
    sees_BKTT = (document_BKT.unsqueeze(3) == document_BKT.unsqueeze(2)).tril()
    within_BKTC = sees_BKTT.to(wide) @ turns_BKTC
    last_BK = document_BKT[:, :, -1]
    before_BK = F.pad(last_BK[:, :-1], (1, 0))
    reaches_BKK = (before_BK.unsqueeze(2) == last_BK.unsqueeze(1)).tril(-1)
    carry_BKC = (reaches_BKK.double() @ within_BKTC[:, :, -1].double()).remainder(FULL_TURN).to(wide)
    continues_BKT1 = (document_BKT == before_BK.unsqueeze(2)).unsqueeze(3)
    theta_BKTC = torch.addcmul(within_BKTC, continues_BKT1.to(wide), carry_BKC.unsqueeze(2))
    return theta_BKTC.flatten(1, 2)[:, :length].unflatten(2, (heads, -1))


BLOCKED = Implementation("blocked", angles)


def _counted(documents_BL: Tensor | None, rows: int, length: int, device: torch.device) -> Tensor:
    """Number the documents of each row from 0, padding rows to full blocks with the last document."""
    starts_BL = document_starts(documents_BL)
    if starts_BL is None:
        starts_BL = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return F.pad(starts_BL, (0, -length % BLOCK)).cumsum(1)
