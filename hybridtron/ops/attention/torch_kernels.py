"""Causal attention by torch's own kernels for CUDA: cuDNN's, FlashAttention 2, and FlashAttention 2 for documents.

torch offers other ways to call the same kernels. `torch.nn.attention.activate_flash_attention_impl` replaces the
FlashAttention in torch by version 3 or 4 for the whole process; its source calls both prototypes. So `flash_attn.py`
calls these packages directly. torch's `varlen_attn` never runs cuDNN (torch 2.13), and nested tensors run cuDNN only
with an environment variable for experiments. So documents have no cuDNN here.

Legend: B rows (sequences in the batch), L tokens per row, H query heads, G key/value heads, K channels per head, E
document boundaries.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridtron.device import cudnn_version
from hybridtron.ops.attention.reference import AttentionInputs, attend_to_rows
from hybridtron.ops.documents import document_boundaries

CUDNN_VERSION = (9, 15, 1)  # torch's own lower limit: before, rows have wrong results unless 128 divides their length
VARLEN_NEEDS = {"window_size", "enable_gqa"}


def cudnn(inputs: AttentionInputs) -> Tensor:
    """Run cuDNN's kernel alone; torch raises an error if cuDNN can't."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend_to_rows(inputs)


def cudnn_missing() -> str | None:
    """Return the reason why torch has no cuDNN that computes every row right, or None."""
    version = cudnn_version()
    if version is None:
        return "torch is built without cuDNN"
    if version < CUDNN_VERSION:
        return f"cuDNN {'.'.join(map(str, version))} is before {'.'.join(map(str, CUDNN_VERSION))}"
    return None


def sdpa(inputs: AttentionInputs) -> Tensor:
    """Run torch's scaled_dot_product_attention: FlashAttention 2, or its kernels for other dtypes.

    It never runs cuDNN, which `hybridtron.device.compute_device` turns off.
    """
    return attend_to_rows(inputs)


def varlen(inputs: AttentionInputs) -> Tensor:
    """Run torch's FlashAttention 2 on rows with documents, with or without a sliding window."""
    q_BLHK, k_BLGK, v_BLGK, window, documents_BL, _, boundaries_E = inputs
    rows, length = q_BLHK.shape[:2]
    if documents_BL is None:
        boundaries_E = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q_BLHK.device)
    elif boundaries_E is None:
        boundaries_E = document_boundaries(documents_BL)
    # window_size counts the keys before and after a query; (-1, 0) is torch's sign for causal attention
    before = -1 if window is None or window >= length else window - 1
    attend = _varlen_attn()
    assert attend is not None
    y = attend(
        *(x.flatten(0, 1) for x in (q_BLHK, k_BLGK, v_BLGK)),
        boundaries_E,
        boundaries_E,
        length,
        length,
        window_size=(before, 0),
        enable_gqa=q_BLHK.shape[2] != k_BLGK.shape[2],
    )
    return y.view_as(q_BLHK)


def varlen_missing() -> str | None:
    """Return the reason why torch has no `varlen_attn` with windows and grouped keys, or None."""
    attend = _varlen_attn()
    if attend is None:
        return f"torch {torch.__version__} has no varlen_attn"
    return _lacking(attend)


@functools.cache
def _lacking(attend: Callable[..., Tensor]) -> str | None:
    """Return a text with the parameters that `varlen_attn` lacks, or None. Cached: to read a signature takes 0.1 ms."""
    if lacking := VARLEN_NEEDS - set(inspect.signature(attend).parameters):
        return f"varlen_attn of torch {torch.__version__} has no {' and no '.join(sorted(lacking))}"
    return None


@functools.cache
def _varlen_attn() -> Callable[..., Tensor] | None:
    """Return torch's `varlen_attn`, or None. The import registers operators, so it waits until the first use."""
    try:
        return importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
