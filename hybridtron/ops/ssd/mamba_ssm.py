"""Mamba-2's scan by the mamba-ssm package's Triton kernels, which support initial states and document boundaries.

The tests use a stand-in for the package. The package itself was not tested or measured on a GPU.

Legend: B rows (sequences in a batch), L tokens, H heads, P head size, G groups, N state size.
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
CHUNK = 256  # tokens per chunk, as in the package's own models


def _unsupported_reason(inputs: SSDInputs) -> str | None:
    if inputs.x_BLHP.dtype == torch.float64:
        return "the kernels do not support float64"
    return None


def _repeats_bits() -> bool:
    """Return True if the installed version of the package supports torch's deterministic mode.

    Such versions have the module `mamba_ssm.utils.determinism`.
    """
    return optional_package("mamba_ssm.utils.determinism").module is not None


def mamba_ssm(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return y in x's dtype, and the state after the last token in fp32, computed by the package's kernels.

    The kernels number documents from 0, and use the initial state only in document 0.
    """
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    per_token = (x_BLHP, B_BLGN, C_BLGN)
    # the kernels multiply x, B and C with each other and need a single dtype for the three
    shared = functools.reduce(torch.promote_types, (t.dtype for t in per_token))
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
