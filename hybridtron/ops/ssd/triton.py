"""The scan of Mamba-2 by Triton kernels of our own (`kernels/ssd`): states in and out, documents, the same bits again.

On CUDA it stands after the mamba-ssm package's form, and takes what that leaves: machines without the package, and
`run.deterministic` with versions of it that can't repeat. Unmeasured on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.ssd.reference import ssd_scan

MAX_HEAD, MAX_STATE = 128, 256  # channels and state entries of a head that fit beside a chunk's tokens


def _refuses(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state_BHPN: Tensor | None,
    documents_BL: Tensor | None,
) -> str | None:
    if torch.float64 in (x_BLHP.dtype, dt_BLH.dtype, B_BLGN.dtype, C_BLGN.dtype):
        return "the kernels have no float64"
    head, state = x_BLHP.shape[3], B_BLGN.shape[3]
    if head > MAX_HEAD or state > MAX_STATE:
        return f"heads of {head} channels and {state} state entries; the kernels take {MAX_HEAD} and {MAX_STATE}"
    return None


@ssd_scan.form("triton", device="cuda", package="triton", refuses=_refuses)
@torch.compiler.disable  # the kernels are compiled already, and what is around them is little
def _triton(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state_BHPN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from hybridtron.ops.ssd import kernels as ssd

    return ssd.ssd_scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL)
