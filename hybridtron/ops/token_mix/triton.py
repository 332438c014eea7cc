"""Token mixing by this project's Triton kernels (`kernels`); they have run in Triton's interpreter only."""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.token_mix.reference import TokenMixInputs

MOST_STREAMS = 5  # the backward kernel has a parameter for each stream's gradient


def _unsupported_reason(inputs: TokenMixInputs) -> str | None:
    if (reason := left_to_torch_compile()) is not None:
        return reason
    streams = len(inputs.mix_SD)
    return None if streams <= MOST_STREAMS else f"takes {MOST_STREAMS} streams, not {streams}"


TRITON = own_kernels("hybridtron.ops.token_mix.kernels:token_mix", _unsupported_reason)
