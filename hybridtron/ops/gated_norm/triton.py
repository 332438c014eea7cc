"""The gated norm by this project's Triton kernels (`kernels`), and the norm before a gate (`kernels_before`).

`gated_squares` and `gated_scale` were checked on an H200 (benchmarks/gpu.md). `gated_norm` was checked there only in an
earlier version, which had fewer warps per group. `norm_before_gate` has run in Triton's interpreter only.
"""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.gated_norm.reference import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    NormBeforeGateInputs,
)
from hybridtron.ops.kernel_launch import own_kernels

MOST_CHANNELS = 1024  # maximum channels per head
MOST_OF_A_GROUP = 8192  # maximum channels per group: a program keeps all of them in registers


def _of_heads(inputs: GatedSquaresInputs | GatedScaleInputs | NormBeforeGateInputs) -> str | None:
    size = inputs.y_BLHP.shape[3]
    if size <= MOST_CHANNELS:
        too_large = None
    else:
        too_large = f"heads of {size} channels; the kernels take {MOST_CHANNELS}"
    return left_to_torch_compile() or too_large


def _of_groups(inputs: GatedNormInputs) -> str | None:
    size = len(inputs.weight_E) // inputs.groups
    if size <= MOST_OF_A_GROUP:
        too_large = None
    else:
        too_large = f"groups of {size} channels; the kernels take {MOST_OF_A_GROUP}"
    return left_to_torch_compile() or too_large


NORM = own_kernels("hybridtron.ops.gated_norm.kernels:gated_norm", _of_groups)
SQUARES = own_kernels("hybridtron.ops.gated_norm.kernels:gated_squares", _of_heads)
SCALE = own_kernels("hybridtron.ops.gated_norm.kernels:gated_scale", _of_heads)
BEFORE_GATE = own_kernels("hybridtron.ops.gated_norm.kernels_before:norm_before_gate", _of_heads)
