"""Triton kernels for the elementwise part of SwiGLU: each kernel reads its inputs once and writes its outputs once.

    g = m gate,   s = sigmoid(g),   y = g s up
    grad gate = m grad_y up s (1 + g (1 - s)),   grad up = grad_y g s

m is the configured multiplier. `gate_kernels` has the code that this op shares with `geglu`. The kernels were checked
on an H200 (benchmarks/gpu.md).

Legend: R rows (all leading axes flattened), F channels for gate and for up, 2F channels in `gate_up`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.gate_kernels import GateKernels, gated, load_one, load_pair, store_one, store_pair
from hybridtron.ops.swiglu.reference import SwiGLUInputs


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    """Return silu(multiplier * gate) * up, with gradients for gate and up."""
    return gated(inputs.gate_up, GateKernels(_forward, _backward, (inputs.multiplier,)))


@triton.jit
def _forward(gate_up_R2F: tl.tensor, y_RF: tl.tensor, channels: int, multiplier: float, BLOCK: tl.constexpr) -> None:
    """Store y for one row and BLOCK channels."""
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    gate_F = multiplier * gate_F
    store_one(y_RF, gate_F * tl.sigmoid(gate_F) * up_F, channels, BLOCK)


@triton.jit
def _backward(
    gate_up_R2F: tl.tensor,
    grad_y_RF: tl.tensor,
    grad_gate_up_R2F: tl.tensor,
    channels: int,
    multiplier: float,
    BLOCK: tl.constexpr,
) -> None:
    """Store the gradients of gate and up for one row and BLOCK channels."""
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    grad_F = load_one(grad_y_RF, channels, BLOCK)
    gate_F = multiplier * gate_F
    share_F = tl.sigmoid(gate_F)
    of_gate_F = multiplier * grad_F * up_F * share_F * (1.0 + gate_F * (1.0 - share_F))
    store_pair(grad_gate_up_R2F, of_gate_F, grad_F * gate_F * share_F, channels, BLOCK)
