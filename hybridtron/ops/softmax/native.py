"""The softmax of the language-model loss by C++ compiled for this CPU (`native/softmax.cpp`).

The code handles one token at a time, so that the token's logits stay in the CPU's cache.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.native.library import call, missing, threads
from hybridtron.ops.native.tensors import KINDS, Tokens, scalar
from hybridtron.ops.precision import wide_type
from hybridtron.ops.softmax.reference import SoftmaxGradientsInputs, SoftmaxSums, SoftmaxSumsInputs

WORTH = 2**17  # logits per thread; with fewer logits an additional thread costs more than it saves


class SoftmaxTask(ctypes.Structure):
    """Arguments for the compiled functions, with the fields of the C++ struct `Softmax` in softmax.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("logits", Tokens),
        *((name, ctypes.c_void_p) for name in ("labels", "mask", "lse", "greatest", "sum", "picked")),
        ("z_loss", ctypes.c_double),
    )


def _unsupported_reason(inputs: SoftmaxSumsInputs | SoftmaxGradientsInputs) -> str | None:
    if inputs.logits_CV.requires_grad and torch.is_grad_enabled():
        return "does not support autograd"
    if inputs.logits_CV.dtype not in KINDS or inputs.labels_C.dtype != torch.int64:
        return "supports logits in fp32, float64 and bf16, and labels in int64"
    if inputs.logits_CV.is_contiguous():
        return None
    return "supports only contiguous logits"


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    logits_CV = inputs.logits_CV
    wide = wide_type(inputs.logits_CV)
    task = _task(logits_CV)
    labels_C = inputs.labels_C.contiguous()
    sums = SoftmaxSums(*(torch.empty(len(logits_CV), dtype=wide) for _ in range(3)))
    task.greatest, task.sum, task.picked = (values.data_ptr() for values in sums)
    task.labels = labels_C.data_ptr()
    call(f"softmax_sums_{scalar(wide)}", task, threads(logits_CV.numel() / WORTH))
    return sums


def softmax_gradients(inputs: SoftmaxGradientsInputs) -> Tensor:
    logits_CV = inputs.logits_CV
    wide = wide_type(inputs.logits_CV)
    task = _task(logits_CV)
    labels_C = inputs.labels_C.contiguous()
    mask_C = inputs.mask_C.contiguous()
    lse_C = inputs.lse_C.to(wide).contiguous()
    task.labels, task.mask, task.lse = labels_C.data_ptr(), mask_C.data_ptr(), lse_C.data_ptr()
    task.z_loss = inputs.z_loss
    call(f"softmax_gradients_{scalar(wide)}", task, threads(logits_CV.numel() / WORTH))
    return logits_CV


SUMS = Implementation("native", softmax_sums, "cpu", unsupported_reason=_unsupported_reason, missing=missing)
GRADIENTS = Implementation("native", softmax_gradients, "cpu", unsupported_reason=_unsupported_reason, missing=missing)


def _task(logits_CV: Tensor) -> SoftmaxTask:
    logits = Tokens.of(logits_CV.unsqueeze(0))
    return SoftmaxTask(tokens=len(logits_CV), size=logits_CV.shape[1], logits=logits)
