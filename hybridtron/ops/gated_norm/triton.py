"""The gated norm's two steps by Triton kernels of our own (`kernels`). Unmeasured on a GPU."""

from __future__ import annotations

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.gated_norm.reference import GatedScaleInputs, GatedSquaresInputs
from hybridtron.ops.kernel_launch import own_kernels

MOST_CHANNELS = 1024  # of a head


def _unsupported_reason(inputs: GatedSquaresInputs | GatedScaleInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    if any(tensor.dtype == torch.float64 for tensor in inputs):
        return "the kernels have no float64"
    size = inputs.y_BLHP.shape[3]
    return None if size <= MOST_CHANNELS else f"heads of {size} channels; the kernels take {MOST_CHANNELS}"


SQUARES = own_kernels("hybridtron.ops.gated_norm.kernels:gated_squares", _unsupported_reason)
SCALE = own_kernels("hybridtron.ops.gated_norm.kernels:gated_scale", _unsupported_reason)
