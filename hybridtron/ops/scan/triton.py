"""The selective scan by Triton kernels of our own, which take and give states and know document borders.

They add up in a fixed order, and keep in memory what the op is given, and one state of every 128 tokens.
Compared with the reference in Triton's interpreter, and compiled for sm_90; unmeasured on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.scan.reference import ScanInputs

LARGEST_STATE = 256  # a power of two of which 8 fit into the registers of one warp


def _unsupported_reason(inputs: ScanInputs) -> str | None:
    if inputs.A_EN.shape[1] > LARGEST_STATE:
        return f"the kernels take a state size of at most {LARGEST_STATE}, not {inputs.A_EN.shape[1]}"
    return "the kernels have no float64" if inputs.x_BLE.dtype == torch.float64 else None


@torch.compiler.disable  # the kernels are compiled already, and what is around them is little
def selective_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """States are (B, N, E) for the kernels: channels side by side in memory."""
    y_BLE, last_BNE = _TritonScan.apply(*inputs)
    return y_BLE, last_BNE.mT


TRITON = Implementation("triton", selective_scan, "cuda", "triton", _unsupported_reason)


class _TritonScan(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        from hybridtron.ops.scan.kernels import ScanRow, forward

        inputs = ScanInputs(*fields)
        y_BLE, last_BNE, states_BKNE = forward(ScanRow.of(inputs), inputs.state_BEN)
        ctx.save_for_backward(*inputs, states_BKNE)
        return y_BLE, last_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLE: Tensor, grad_last_BNE: Tensor) -> tuple[Tensor | None, ...]:
        from hybridtron.ops.scan.kernels import ScanRow
        from hybridtron.ops.scan.kernels_backward import backward

        saved: tuple[Any, ...] = ctx.saved_tensors
        inputs, states_BKNE = ScanInputs(*saved[:-1]), saved[-1]
        found = backward(ScanRow.of(inputs), states_BKNE, grad_y_BLE, grad_last_BNE)
        pairs = zip(found, inputs[:-1], strict=True)
        return *(None if t is None or g is None else g.to(t.dtype) for g, t in pairs), None
