"""The gate of a SwiGLU block by Triton: forward and backward each read what they need once and write it once.

    y = g s u,   dg = dy u s (1 + g (1 - s)),   du = dy g s,   s = sigmoid(g),   g = multiplier * gate

What all gates share is in `gate_kernels`. Right on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.gate_kernels import GateKernels, gated, load_one, load_pair, store_one, store_pair
from hybridtron.ops.swiglu.reference import SwiGLUInputs


def swiglu(inputs: SwiGLUInputs) -> Tensor:
    """y, with a backward pass."""
    return gated(inputs.gate_up, GateKernels(_forward, _backward, (inputs.multiplier,)))


@triton.jit
def _forward(gate_up_R2F: tl.tensor, y_RF: tl.tensor, channels: int, multiplier: float, BLOCK: tl.constexpr) -> None:
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    gate_F = multiplier * gate_F
    store_one(y_RF, gate_F * tl.sigmoid(gate_F) * up_F, channels, BLOCK)


@triton.jit
def _backward(
    gate_up_R2F: tl.tensor,
    grad_y_RF: tl.tensor,
    found_R2F: tl.tensor,
    channels: int,
    multiplier: float,
    BLOCK: tl.constexpr,
) -> None:
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    grad_F = load_one(grad_y_RF, channels, BLOCK)
    gate_F = multiplier * gate_F
    share_F = tl.sigmoid(gate_F)
    of_gate_F = multiplier * grad_F * up_F * share_F * (1.0 + gate_F * (1.0 - share_F))
    store_pair(found_R2F, of_gate_F, grad_F * gate_F * share_F, channels, BLOCK)
