"""The softmax of the head's loss by Triton kernels of our own (`kernels`); unmeasured on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.softmax.reference import SoftmaxGradientsInputs, SoftmaxSums, SoftmaxSumsInputs


def _unsupported_reason(inputs: SoftmaxSumsInputs | SoftmaxGradientsInputs) -> str | None:
    return "the kernel has no float64" if inputs.logits_CV.dtype == torch.float64 else None


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    from hybridtron.ops.softmax import kernels

    return kernels.softmax_sums(inputs)


def softmax_gradients(inputs: SoftmaxGradientsInputs) -> Tensor:
    from hybridtron.ops.softmax import kernels

    return kernels.softmax_gradients(inputs)


SUMS = Implementation("triton", softmax_sums, "cuda", "triton", _unsupported_reason)
GRADIENTS = Implementation("triton", softmax_gradients, "cuda", "triton", _unsupported_reason)
