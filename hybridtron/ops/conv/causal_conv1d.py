"""The causal convolution by the CUDA kernel of the package causal-conv1d.

The tests use a stand-in for the package. The package itself was checked once, on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from hybridtron.device import optional_package
from hybridtron.ops.conv.reference import ConvInputs
from hybridtron.ops.dispatch import Implementation

PACKAGE = "causal_conv1d"


def _unsupported_reason(inputs: ConvInputs) -> str | None:
    if inputs.documents_BL is not None and inputs.tail_BTC is not None:
        return "the kernel takes document boundaries or a tail, not both"
    if not 2 <= inputs.width <= 4:
        return f"the kernel takes widths of 2 to 4, not {inputs.width}"
    if inputs.x_BLC.shape[2] % 8 != 0:
        return f"the kernel takes a multiple of 8 channels, not {inputs.x_BLC.shape[2]}"
    if inputs.x_BLC.dtype == torch.float64:
        return "the kernel has no float64"
    return None


def _repeats_bits() -> bool:
    """Return True if the kernel's gradients can be deterministic; this requires version 1.6 or later of the package.

    From version 1.6 on, torch.use_deterministic_algorithms makes the kernel sum the weight's gradient in a fixed order.
    If the version can't be parsed, return False.
    """
    try:
        return Version(str(getattr(optional_package(PACKAGE).module, "__version__", "0"))) >= Version("1.6")
    except InvalidVersion:
        return False


def causal_conv(inputs: ConvInputs) -> Tensor:
    """Call the kernel on x with contiguous channels, the only layout in which it takes a tail or documents."""
    x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation, _ = inputs
    aligned = x_BLC.stride(2) == 1 and x_BLC.stride(1) % 8 == 0 and x_BLC.stride(0) % 8 == 0
    package = optional_package(PACKAGE).module
    assert package is not None
    y_BCL = package.causal_conv1d_fn(
        (x_BLC if aligned else x_BLC.contiguous()).transpose(1, 2),
        weight_CW,
        None if bias_C is None else bias_C.to(weight_CW.dtype),
        seq_idx=None if documents_BL is None else documents_BL.to(torch.int32).contiguous(),
        initial_states=None if tail_BTC is None else tail_BTC.to(x_BLC.dtype).contiguous().transpose(1, 2),
        activation="silu" if activation else None,
    )
    return y_BCL.transpose(1, 2)


CAUSAL_CONV1D = Implementation("causal-conv1d", causal_conv, "cuda", PACKAGE, _unsupported_reason, _repeats_bits)
