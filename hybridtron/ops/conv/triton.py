"""The causal convolution by this project's Triton kernels, which support a tail and documents together.

The kernels are deterministic, and save only their inputs for the backward pass. Their results were compared with the
reference in Triton's interpreter. An earlier version was also compared on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.conv.reference import ConvInputs
from hybridtron.ops.kernel_launch import own_kernels

WIDTHS = range(2, 9)


def _unsupported_reason(inputs: ConvInputs) -> str | None:
    if inputs.width not in WIDTHS:
        return f"the kernels take widths of {WIDTHS[0]} to {WIDTHS[-1]}, not {inputs.width}"
    return None


TRITON = own_kernels("hybridtron.ops.conv.kernels:causal_conv", _unsupported_reason)
