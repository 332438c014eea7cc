"""The scan of Mamba-2 by Triton kernels of our own (`kernels`): states in and out, documents, the same bits again.

In the op's list it follows the mamba-ssm package, and takes what that leaves: machines without the package, and
`run.deterministic` with versions of it that can't repeat their bits. Unmeasured on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_starts
from hybridtron.ops.ssd.reference import SSDInputs

MAX_HEAD, MAX_STATE = 128, 256  # channels and state entries of a head that fit beside a chunk's tokens


def _unsupported_reason(inputs: SSDInputs) -> str | None:
    if torch.float64 in (inputs.x_BLHP.dtype, inputs.dt_BLH.dtype, inputs.B_BLGN.dtype, inputs.C_BLGN.dtype):
        return "the kernels have no float64"
    head, state = inputs.x_BLHP.shape[3], inputs.B_BLGN.shape[3]
    if head > MAX_HEAD or state > MAX_STATE:
        return f"heads of {head} channels and {state} state entries; the kernels take {MAX_HEAD} and {MAX_STATE}"
    return None


@torch.compiler.disable  # the kernels are compiled already, and what is around them is little
def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """x, B and C in one type, the widest of theirs; parameters and states in fp32; documents counted from 0."""
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (x_BLHP, B_BLGN, C_BLGN)))
    x, B, C = (t.to(shared) for t in (x_BLHP, B_BLGN, C_BLGN))
    A, D, dt_bias = (t.float() for t in (A_H, D_H, dt_bias_H))
    state = None if state_BHPN is None else state_BHPN.float()
    starts_BL = document_starts(documents_BL)
    counted_BL = None if starts_BL is None else starts_BL.cumsum(1).to(torch.int32)
    y_BLHP, last_BHPN = _TritonSSD.apply(x, dt_BLH, A, B, C, D, dt_bias, state, counted_BL)
    return y_BLHP.to(x_BLHP.dtype), last_BHPN


TRITON = Implementation("triton", ssd_scan, "cuda", "triton", _unsupported_reason)


class _TritonSSD(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        from hybridtron.ops.ssd.kernels import SSDRow, forward

        contiguous: list[Any] = [t if t is None else t.contiguous() for t in fields]
        ctx.save_for_backward(*contiguous)
        return forward(SSDRow(*contiguous))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHPN: Tensor) -> tuple[Tensor | None, ...]:
        from hybridtron.ops.ssd.kernels import SSDRow, backward

        row = SSDRow(*ctx.saved_tensors)
        *grads, grad_state_BHPN = backward(row, grad_y_BLHP.contiguous(), grad_last_BHPN.contiguous())
        return *grads, None if row.state_BHPN is None else grad_state_BHPN, None
