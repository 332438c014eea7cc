"""The selective scan by Triton kernels of our own, which take and give states and know document borders.

They add up in a fixed order, and keep in memory what the op is given, and one state of every 128 tokens.
Compared with the reference in Triton's interpreter, and compiled for sm_90; right on an H200
(benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.scan.reference import ScanInputs

LARGEST_STATE = 256  # a power of two of which 8 fit into the registers of one warp


def _unsupported_reason(inputs: ScanInputs) -> str | None:
    if inputs.A_EN.shape[1] > LARGEST_STATE:
        return f"the kernels take a state size of at most {LARGEST_STATE}, not {inputs.A_EN.shape[1]}"
    return None


TRITON = own_kernels("hybridtron.ops.scan.kernels_backward:selective_scan", _unsupported_reason)
