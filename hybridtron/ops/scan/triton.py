"""The selective scan by our own Triton kernels, with initial and final states and document boundaries.

Sums have a fixed order. Backward keeps the op's inputs and one state per 128 tokens. Compared with the reference in
Triton's interpreter, compiled for sm_90, and checked on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.scan.reference import ScanInputs

LARGEST_STATE = 256  # a power of two; the registers of one warp hold states of this size for 8 channels


def _unsupported_reason(inputs: ScanInputs) -> str | None:
    if inputs.A_EN.shape[1] > LARGEST_STATE:
        return f"the kernels take a state size of at most {LARGEST_STATE}, not {inputs.A_EN.shape[1]}"
    return None


TRITON = own_kernels("hybridtron.ops.scan.kernels_backward:selective_scan", _unsupported_reason)
