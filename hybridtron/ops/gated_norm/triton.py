"""The gated norm, in full and as two steps, by Triton kernels of our own (`kernels`).

Correct on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.gated_norm.reference import GatedNormInputs, GatedScaleInputs, GatedSquaresInputs
from hybridtron.ops.kernel_launch import own_kernels

MOST_CHANNELS = 1024  # of a head
MOST_OF_A_GROUP = 8192  # channels of a group, which a program holds in its registers


def _of_heads(inputs: GatedSquaresInputs | GatedScaleInputs) -> str | None:
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
