"""The softmax of the head's loss by Triton kernels of our own (`kernels`); unmeasured on a GPU."""

from __future__ import annotations

import torch

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.softmax.reference import SoftmaxGradientsInputs, SoftmaxSumsInputs


def _unsupported_reason(inputs: SoftmaxSumsInputs | SoftmaxGradientsInputs) -> str | None:
    return "the kernel has no float64" if inputs.logits_CV.dtype == torch.float64 else None


SUMS = own_kernels("hybridtron.ops.softmax.kernels:softmax_sums", _unsupported_reason)
GRADIENTS = own_kernels("hybridtron.ops.softmax.kernels:softmax_gradients", _unsupported_reason)
