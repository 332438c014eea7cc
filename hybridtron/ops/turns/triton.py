"""Keys and queries turned by Triton kernels of our own (`kernels`). Unmeasured on a GPU."""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.turns.reference import TurnInputs

MOST_CHANNELS = 256  # of a head, which one program holds for some tokens


def _unsupported_reason(inputs: TurnInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    channels = inputs.k_BLGN.shape[3]
    return None if channels <= MOST_CHANNELS else f"takes {MOST_CHANNELS} channels of a head, not {channels}"


TRITON = own_kernels("hybridtron.ops.turns.kernels:turn_pairs", _unsupported_reason)
