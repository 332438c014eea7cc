"""A row's rotation angles in torch, by masked matrix multiplications over token blocks.

The angle theta_t is the sum of the turns in t's document, up to the token t. A row is divided into blocks of BLOCK
tokens:

    turn_t  = step_t rate_t
    theta_t = sum over the turns in t's block and t's document, up to t
              + carry into the block, if t's document began before the block
    carry into a block = sum over those turns in earlier blocks that belong to the document of the token before
                         the block, modulo 2 pi

Each sum has only turns of one document. If angles were computed as differences between two sums over the row, they
would contain rounding errors from other documents. Sums inside a block are fp32: they amount to only a few full turns,
so their rounding errors are small. Sums over blocks are float64.

Legend: B rows (sequences in the batch), L tokens per row, H heads, S angles per head, K blocks, T tokens per block,
C = H * S channels (a channel for each angle of each head).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.rotations.reference import FULL_TURN, AngleInputs

BLOCK = 32  # tokens per block


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
    """Return each token's document number (B, K * T), from 0 in each row; padding tokens have the last number."""
    starts_BL = document_starts(documents_BL)
    if starts_BL is None:
        starts_BL = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return F.pad(starts_BL, (0, -length % BLOCK)).cumsum(1)
