"""The scan of Mamba-2 by Triton kernels of our own (`kernels`): states in and out, documents, the same bits again.

In the op's list it follows the mamba-ssm package, and takes what that leaves: machines without the package, and
`run.deterministic` with versions of it that can't repeat their bits. Unmeasured on a GPU.
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.ssd.reference import SSDInputs

MAX_HEAD, MAX_STATE = 128, 256  # channels and state entries of a head that fit beside a chunk's tokens


def _unsupported_reason(inputs: SSDInputs) -> str | None:
    head, state = inputs.x_BLHP.shape[3], inputs.B_BLGN.shape[3]
    if head > MAX_HEAD or state > MAX_STATE:
        return f"heads of {head} channels and {state} state entries; the kernels take {MAX_HEAD} and {MAX_STATE}"
    return None


TRITON = own_kernels("hybridtron.ops.ssd.kernels:ssd_scan", _unsupported_reason)
