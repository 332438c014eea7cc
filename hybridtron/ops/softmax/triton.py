"""The softmax of the head's loss by Triton kernels of our own (`kernels/cross_entropy`); unmeasured on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.loss.chunked import Sums, softmax_gradients, softmax_sums


def _refuse_sums(logits_CV: Tensor, labels_C: Tensor) -> str | None:
    return "the kernel has no float64" if logits_CV.dtype == torch.float64 else None


def _refuse_gradients(logits_CV: Tensor, labels_C: Tensor, mask_C: Tensor, lse_C: Tensor, z_loss: float) -> str | None:
    return _refuse_sums(logits_CV, labels_C)


@softmax_sums.form("triton", device="cuda", package="triton", refuses=_refuse_sums)
def _sums(logits_CV: Tensor, labels_C: Tensor) -> Sums:
    from hybridtron.ops.softmax import kernels as cross_entropy

    return cross_entropy.softmax_sums(logits_CV, labels_C)


@softmax_gradients.form("triton", device="cuda", package="triton", refuses=_refuse_gradients)
def _gradients(logits_CV: Tensor, labels_C: Tensor, mask_C: Tensor, lse_C: Tensor, z_loss: float) -> Tensor:
    from hybridtron.ops.softmax import kernels as cross_entropy

    return cross_entropy.softmax_gradients(logits_CV, labels_C, mask_C, lse_C, z_loss)
