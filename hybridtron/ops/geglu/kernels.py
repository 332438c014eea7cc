"""The gate of a GEGLU block by Triton: forward and backward each read what they need once and write it once.

    y = g P u,   dg = dy u (P + g p),   du = dy g P

P and p are the standard normal's distribution function and density at g. What all gates share is in `gate_kernels`.
Right on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.gate_kernels import GateKernels, gated, load_one, load_pair, store_one, store_pair
from hybridtron.ops.geglu.reference import GEGLUInputs

ROOT_HALF = tl.constexpr(math.sqrt(0.5))
HIGHEST = tl.constexpr(1 / math.sqrt(2 * math.pi))  # of the density


def geglu(inputs: GEGLUInputs) -> Tensor:
    """y, with a backward pass."""
    return gated(inputs.gate_up, GateKernels(_forward, _backward))


@triton.jit
def _below(gate_F: tl.tensor) -> tl.tensor:
    """The distribution function."""
    return 0.5 * (1.0 + tl.erf(gate_F * ROOT_HALF))


@triton.jit
def _forward(gate_up_R2F: tl.tensor, y_RF: tl.tensor, channels: int, BLOCK: tl.constexpr) -> None:
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    store_one(y_RF, gate_F * _below(gate_F) * up_F, channels, BLOCK)


@triton.jit
def _backward(
    gate_up_R2F: tl.tensor, grad_y_RF: tl.tensor, found_R2F: tl.tensor, channels: int, BLOCK: tl.constexpr
) -> None:
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    grad_F = load_one(grad_y_RF, channels, BLOCK)
    below_F, density_F = _below(gate_F), HIGHEST * tl.exp(-0.5 * gate_F * gate_F)
    of_gate_F = grad_F * up_F * (below_F + gate_F * density_F)
    store_pair(found_R2F, of_gate_F, grad_F * gate_F * below_F, channels, BLOCK)
