"""The angles of a row by products with zeros and ones: over the tokens of a block, then over the blocks before it.

    theta_t = sum of turns of t's document in its block up to t + carry of its block, where the document began before it
    carry   = sum, over the blocks before, of what the same document has turned there to their ends, modulo 2 pi

A difference of sums over the row would leave the rounding of other documents in a document's angles. Inside of a block
sums are in fp32 and few turns long; over blocks they are in float64.

Legend: as in `reference`; K blocks of T tokens, C = H S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.turns.reference import FULL_TURN, AngleInputs, initial_angles

BLOCK = 32  # tokens


def angles(inputs: AngleInputs) -> tuple[Tensor, Tensor]:
    steps_BLH, rates_BLS, _, documents_BL = inputs
    rows, length, heads = steps_BLH.shape
    wide, missing = wide_type(steps_BLH), -length % BLOCK
    turns_BLHS = steps_BLH.to(wide).unsqueeze(3) * rates_BLS.to(wide).unsqueeze(2)
    turns_BKTC = F.pad(turns_BLHS.flatten(2), (0, 0, 0, missing)).unflatten(1, (-1, BLOCK))
    document_BKT = _counted(documents_BL, rows, length, steps_BLH.device).unflatten(1, (-1, BLOCK))
    sees_BKTT = (document_BKT.unsqueeze(3) == document_BKT.unsqueeze(2)).tril()
    within_BKTC = sees_BKTT.to(wide) @ turns_BKTC
    carry_BKC = _carried(within_BKTC[:, :, -1], document_BKT[:, :, -1], initial_angles(inputs).flatten(1))
    continues_BKT = document_BKT == F.pad(document_BKT[:, :-1, -1], (1, 0)).unsqueeze(2)
    theta_BKTC = within_BKTC + continues_BKT.unsqueeze(3) * carry_BKC.unsqueeze(2)
    theta_BLHS = theta_BKTC.flatten(1, 2)[:, :length].unflatten(2, (heads, -1))
    return theta_BLHS, theta_BLHS[:, -1].remainder(FULL_TURN)


BLOCKED = Implementation("blocked", angles)


def _counted(documents_BL: Tensor | None, rows: int, length: int, device: torch.device) -> Tensor:
    """Documents from 0 on in every row, which is filled up to whole blocks with its last one."""
    starts_BL = document_starts(documents_BL)
    if starts_BL is None:
        starts_BL = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return F.pad(starts_BL, (0, -length % BLOCK)).cumsum(1)


def _carried(turned_BKC: Tensor, last_BK: Tensor, state_BC: Tensor) -> Tensor:
    """The angles before every block, of what blocks turn by their ends and the documents that they end with."""
    before_BK = F.pad(last_BK[:, :-1], (1, 0))  # the state before the row is document 0's
    reaches_BKK = (before_BK.unsqueeze(2) == last_BK.unsqueeze(1)).tril(-1)
    sums_BKC = reaches_BKK.double() @ turned_BKC.double() + (before_BK == 0).unsqueeze(2) * state_BC.double().unsqueeze(
        1
    )
    return sums_BKC.remainder(FULL_TURN).to(turned_BKC.dtype)
