"""Root-mean-square norm, and the same of a sum, by Triton kernels of our own (`kernels/rms_norm`).

Unmeasured on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.norm.reference import add_rms_norm, rms_norm

MAX_CHANNELS = 8192  # of a row, which the registers of one program hold


def _refuses(x: Tensor, weight: Tensor, eps: float) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile joins the reference to what stands around it"
    if torch.float64 in (x.dtype, weight.dtype):
        return "the kernels have no float64"
    if x.shape[-1] > MAX_CHANNELS:
        return f"rows of {x.shape[-1]} channels; the kernels take {MAX_CHANNELS}"
    return None


@rms_norm.form("triton", device="cuda", package="triton", refuses=_refuses)
def _triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from hybridtron.ops.norm import kernels

    return kernels.rms_norm(x, weight, eps)


def _refuses_sum(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> str | None:
    if x.shape != added.shape or torch.promote_types(x.dtype, added.dtype) != x.dtype:
        told = f"not {added.dtype} {[*added.shape]} to {x.dtype} {[*x.shape]}"
        return f"the kernels add tensors of one shape, the second no wider than the first, {told}"
    return _refuses(x, weight, eps)


@add_rms_norm.form("triton", device="cuda", package="triton", refuses=_refuses_sum)
def _triton_sum(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from hybridtron.ops.norm import kernels

    return kernels.add_rms_norm(x, added, weight, eps)
