"""Triton kernels for the elementwise part of GEGLU: each kernel reads its inputs once and writes its outputs once.

    y = g P u,   dg = dy u (P + g p),   du = dy g P

g is the gate, and u is `up`. P is the cumulative distribution function of the standard normal distribution at g, and p
is its density at g. `gate_kernels.py` has the code that the kernels of all gated MLPs share. The kernels were checked
on an H200 (benchmarks/gpu.md).

Legend: R tokens (all leading axes, flattened), F channels each for gate and up.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.gate_kernels import GateKernels, gated, load_one, load_pair, store_one, store_pair
from hybridtron.ops.geglu.reference import GEGLUInputs

ROOT_HALF = tl.constexpr(math.sqrt(0.5))
HIGHEST = tl.constexpr(1 / math.sqrt(2 * math.pi))  # the density p at g = 0, its maximum


def geglu(inputs: GEGLUInputs) -> Tensor:
    """Return gelu(gate) * up. Gradients with respect to gate and up are supported."""
    return gated(inputs.gate_up, GateKernels(_forward, _backward))


@triton.jit
def _below(gate_F: tl.tensor) -> tl.tensor:
    """Return P, the cumulative distribution function at g."""
    return 0.5 * (1.0 + tl.erf(gate_F * ROOT_HALF))


@triton.jit
def _forward(gate_up_R2F: tl.tensor, y_RF: tl.tensor, channels: int, BLOCK: tl.constexpr) -> None:
    """Store y for one token and BLOCK channels."""
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    store_one(y_RF, gate_F * _below(gate_F) * up_F, channels, BLOCK)


@triton.jit
def _backward(
    gate_up_R2F: tl.tensor, grad_y_RF: tl.tensor, grad_gate_up_R2F: tl.tensor, channels: int, BLOCK: tl.constexpr
) -> None:
    """Store dg and du for one token and BLOCK channels."""
    gate_F, up_F = load_pair(gate_up_R2F, channels, BLOCK)
    grad_F = load_one(grad_y_RF, channels, BLOCK)
    below_F = _below(gate_F)
    density_F = HIGHEST * tl.exp(-0.5 * gate_F * gate_F)
    of_gate_F = grad_F * up_F * (below_F + gate_F * density_F)
    store_pair(grad_gate_up_R2F, of_gate_F, grad_F * gate_F * below_F, channels, BLOCK)
