"""The selective scan by Triton kernels of our own, which take and give states and know document borders.

They add up in a fixed order, and keep in memory what the op is given, and one state of every 128 tokens.
Held against the reference in Triton's interpreter, and compiled for sm_90; unmeasured on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.scan.reference import document_starts, selective_scan

LARGEST_STATE = 256  # a power of two of which 8 fit into the registers of one warp


def _refuses(
    x_BLE: Tensor,
    dt_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    z_BLE: Tensor | None,
    dt_bias_E: Tensor,
    state_BEN: Tensor | None,
    documents_BL: Tensor | None,
) -> str | None:
    if A_EN.shape[1] > LARGEST_STATE:
        return f"the kernels take a state size of at most {LARGEST_STATE}, not {A_EN.shape[1]}"
    return "the kernels have no float64" if x_BLE.dtype == torch.float64 else None


@selective_scan.form("triton", device="cuda", package="triton", refuses=_refuses)
@torch.compiler.disable  # the kernels are compiled already, and what is around them is little
def _triton(
    x_BLE: Tensor,
    dt_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    z_BLE: Tensor | None,
    dt_bias_E: Tensor,
    state_BEN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """States are (B, N, E) for the kernels: channels side by side in memory."""
    state_BNE = None if state_BEN is None else state_BEN.mT
    starts_BL = document_starts(documents_BL)
    y_BLE, last_BNE = _Scan.apply(x_BLE, dt_BLE, A_EN.mT, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E, state_BNE, starts_BL)
    return y_BLE, last_BNE.mT


def takes_instead(A_EN: Tensor, state_BEN: Tensor | None) -> bool:
    """Whether a call with a state is for this form, rather than for one that has to add the state's share by hand."""
    return state_BEN is not None and FORM.unusable("cuda") is None and A_EN.shape[1] <= LARGEST_STATE


FORM = selective_scan.named("triton")


class _Scan(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLE: Tensor,
        dt_BLE: Tensor,
        A_NE: Tensor,
        B_BLN: Tensor,
        C_BLN: Tensor,
        D_E: Tensor,
        z_BLE: Tensor | None,
        dt_bias_E: Tensor,
        state_BNE: Tensor | None,
        starts_BL: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        from hybridtron.ops.scan.kernels import Row, forward

        row = Row.of(x_BLE, dt_BLE, A_NE, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E, starts_BL)
        y_BLE, last_BNE, states_BKNE = forward(row, None if state_BNE is None else state_BNE.float().contiguous())
        ctx.save_for_backward(
            x_BLE, dt_BLE, A_NE, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E, state_BNE, starts_BL, states_BKNE
        )
        return y_BLE, last_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLE: Tensor, grad_last_BNE: Tensor) -> tuple[Tensor | None, ...]:
        from hybridtron.ops.scan.kernels import Row
        from hybridtron.ops.scan.kernels_backward import backward

        saved: tuple[Any, ...] = ctx.saved_tensors
        *inputs, state_BNE, starts_BL, states_BKNE = saved
        x_BLE, dt_BLE, A_NE, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E = inputs
        row = Row.of(x_BLE, dt_BLE, A_NE, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E, starts_BL)
        grads = backward(row, states_BKNE, grad_y_BLE, grad_last_BNE)
        found = (grads.x_BLE, grads.dt_BLE, grads.A_NE, grads.B_BLN, grads.C_BLN, grads.D_E, grads.z_BLE)
        found = (*found, grads.dt_bias_E, grads.state_BNE)
        wanted = (*inputs, state_BNE)
        return *(None if t is None or g is None else g.to(t.dtype) for g, t in zip(found, wanted, strict=True)), None
