"""Root-mean-square norm, alone and after an addition, by Triton kernels of our own (`kernels`).

Correct on an H200 (benchmarks/gpu.md) with one row at a time per program; tiles have run in the interpreter alone.
"""

from __future__ import annotations

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.norm.reference import AddRMSNormInputs, RMSNormInputs

MAX_CHANNELS = 8192  # of a row, which one program holds in its registers


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
