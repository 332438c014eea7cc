"""The selective scan by this project's Triton kernels, with initial and final states and document boundaries.

The kernels use no atomic additions, so results are deterministic. The op's inputs and one state per 128 tokens are
saved for the backward pass. The kernels were compared with the reference in Triton's interpreter, and were compiled for
sm_90 and checked on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.scan.reference import ScanInputs

LARGEST_STATE = 256  # maximum state entries per channel; a warp's registers hold 8 channels of this size


def _unsupported_reason(inputs: ScanInputs) -> str | None:
    if inputs.A_EN.shape[1] > LARGEST_STATE:
        return f"the kernels support a state size of at most {LARGEST_STATE}, not {inputs.A_EN.shape[1]}"
    return None


TRITON = own_kernels("hybridtron.ops.scan.kernels_backward:selective_scan", _unsupported_reason)
