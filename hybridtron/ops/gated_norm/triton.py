"""The gated norm by this project's Triton kernels (`kernels`), and the norm before a gate (`kernels_before`).

`gated_squares` and `gated_scale` were checked on an H200 (benchmarks/gpu.md). `gated_norm` was checked there only in an
earlier version, which had fewer warps per group. `norm_before_gate` has run in Triton's interpreter only.
"""

from __future__ import annotations

from hybridtron.ops.gated_norm.reference import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    NormBeforeGateInputs,
)
from hybridtron.ops.kernel_launch import own_kernels, refused_above

MOST_CHANNELS = 1024  # maximum channels per head
MOST_OF_A_GROUP = 8192  # maximum channels per group: a program keeps all of them in registers


def _of_heads(inputs: GatedSquaresInputs | GatedScaleInputs | NormBeforeGateInputs) -> str | None:
    size = inputs.y_BLHP.shape[3]
    return refused_above(MOST_CHANNELS, size, f"heads of {size} channels")


def _of_groups(inputs: GatedNormInputs) -> str | None:
    size = len(inputs.weight_E) // inputs.groups
    return refused_above(MOST_OF_A_GROUP, size, f"groups of {size} channels")


NORM = own_kernels("hybridtron.ops.gated_norm.kernels:gated_norm", _of_groups)
SQUARES = own_kernels("hybridtron.ops.gated_norm.kernels:gated_squares", _of_heads)
SCALE = own_kernels("hybridtron.ops.gated_norm.kernels:gated_scale", _of_heads)
BEFORE_GATE = own_kernels("hybridtron.ops.gated_norm.kernels_before:norm_before_gate", _of_heads)
