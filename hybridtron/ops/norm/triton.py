"""Root-mean-square norm by this project's Triton kernels (`kernels`), alone or after an addition.

A program computes a tile: one long row, or several short rows. Tiles with one row were checked on an H200
(benchmarks/gpu.md). Tiles with several rows, and the kernel that adds up partial sums of the weight's gradient, have
run only in Triton's interpreter.
"""

from __future__ import annotations

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs

MAX_CHANNELS = 8192  # maximum size of the last axis: a program keeps all its channels in registers


def _unsupported_reason(inputs: RMSNormInputs | AddRMSNormInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    if inputs.x.shape[-1] > MAX_CHANNELS:
        return f"rows of {inputs.x.shape[-1]} channels; the kernels take {MAX_CHANNELS}"
    return None


def _unsupported_sum_reason(inputs: AddRMSNormInputs) -> str | None:
    x = inputs.x
    added = inputs.added
    if x.shape != added.shape or torch.promote_types(x.dtype, added.dtype) != x.dtype:
        difference = f"not {added.dtype} {[*added.shape]} to {x.dtype} {[*x.shape]}"
        return f"the kernels add tensors of one shape, the second no wider than the first, {difference}"
    return _unsupported_reason(inputs)


NORM = own_kernels("hybridtron.ops.norm.kernels:rms_norm", _unsupported_reason)
ADD_NORM = own_kernels("hybridtron.ops.norm.kernels:add_rms_norm", _unsupported_sum_reason)
