"""The scan of Mamba-2 by the mamba-ssm package's Triton kernels, with states and document boundaries.

Tested against a stand-in for the package only; unmeasured on a GPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybridtron.device import optional_package
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_starts
from hybridtron.ops.ssd.reference import SSDInputs

PACKAGE = "mamba_ssm.ops.triton.ssd_combined"
CHUNK = 256  # tokens, as in the package's own models


def _unsupported_reason(inputs: SSDInputs) -> str | None:
    if inputs.x_BLHP.dtype == torch.float64:
        return "the kernels have no float64"
    return None


def _repeats_bits() -> bool:
    """Return True if the installed version can sum in a fixed order when torch asks for determinism.

    Exactly these versions have the module that is looked for.
    """
    return optional_package("mamba_ssm.utils.determinism").module is not None


def mamba_ssm(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Run the package's kernels, which count documents from 0 and pass the initial state to document 0 only."""
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    per_token = (x_BLHP, B_BLGN, C_BLGN)
    shared = functools.reduce(torch.promote_types, (t.dtype for t in per_token))  # their products need one type for all
    x, B, C = (t.to(shared) for t in per_token)
    starts_BL = document_starts(documents_BL)
    package = optional_package(PACKAGE).module
    assert package is not None
    y_BLHP, last_BHPN = package.mamba_chunk_scan_combined(
        x,
        dt_BLH,
        A_H.float(),
        B,
        C,
        CHUNK,
        D=D_H.float(),
        dt_bias=dt_bias_H.float(),
        initial_states=None if state_BHPN is None else state_BHPN.float().contiguous(),
        seq_idx=None if starts_BL is None else starts_BL.cumsum(1).to(torch.int32).contiguous(),
        dt_softplus=True,
        return_final_states=True,
    )
    return y_BLHP.to(x_BLHP.dtype), last_BHPN.float()


MAMBA_SSM = Implementation("mamba-ssm", mamba_ssm, "cuda", PACKAGE, _unsupported_reason, _repeats_bits)
