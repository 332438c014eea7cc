"""Rotary positions by this project's Triton kernel (`kernels`), which was checked on an H200 (benchmarks/gpu.md)."""

from __future__ import annotations

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.rope.reference import RopeInputs

MOST_CHANNELS = 16384  # maximum channels per token, over all heads: one program computes all of them


def _unsupported_reason(inputs: RopeInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    if inputs.x_BLHK.dtype == torch.float64:
        return "the kernel has no float64"
    channels = inputs.x_BLHK.shape[2] * inputs.x_BLHK.shape[3]
    if channels <= MOST_CHANNELS:
        return None
    return f"takes {MOST_CHANNELS} channels of a token, not {channels}"


TRITON = own_kernels("hybridtron.ops.rope.kernels:apply_rope", _unsupported_reason)
