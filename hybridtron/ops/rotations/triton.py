"""Rotation angles, and rotated keys and queries, by Triton kernels (`kernels_angles`, `kernels`).

Results were compared with the reference in Triton's interpreter and on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.rotations.reference import AngleInputs, TurnInputs

MOST_CHANNELS = 256  # maximum channels per head: a program computes all of a head's channels


def _unsupported_angles(inputs: AngleInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    pairs = inputs.rates_BLS.shape[2]
    if 2 * pairs <= MOST_CHANNELS:
        return None
    return f"takes {MOST_CHANNELS} channels of a head, not {2 * pairs}"


def _unsupported_turns(inputs: TurnInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    channels = inputs.k_BLGN.shape[3]
    if channels <= MOST_CHANNELS:
        return None
    return f"takes {MOST_CHANNELS} channels of a head, not {channels}"


ANGLES = own_kernels("hybridtron.ops.rotations.kernels_angles:angles", _unsupported_angles)
TURNS = own_kernels("hybridtron.ops.rotations.kernels:turn_pairs", _unsupported_turns)
