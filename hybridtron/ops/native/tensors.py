"""Descriptions of tensors for the compiled functions: address, type, and the strides of rows and tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts

LOG2E = 1.4426950408889634
"""Turns a rate of exp into one of 2^x, which is what the compiled recurrences compute."""
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


class Tokens(ctypes.Structure):
    """A tensor (rows, tokens, ...) with dense axes after its tokens: `Tokens` in numbers.h.

    Strides count elements. A null address marks an absent tensor.
    """

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )

    @staticmethod
    def of(tensor: Tensor | None) -> Tokens:
        if tensor is None:
            return Tokens(None, 0, 0, 0)
        return Tokens(tensor.data_ptr(), KINDS[tensor.dtype], tensor.stride(0), tensor.stride(1))


def unsupported_types(*tensors: Tensor) -> str | None:
    """Return why compiled functions can't take tensors of these types, or None if it can."""
    if all(tensor.dtype in KINDS for tensor in tensors):
        return None
    return "takes fp32, float64 and bf16"


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor in a form that `Tokens` can describe: a known type, and dense axes after rows and tokens.

    It is copied only if its type or strides require that.
    """
    if tensor.dtype not in KINDS:
        tensor = tensor.float()
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a tensor of the same shape, with rows and tokens in the same order in memory."""
    kind = dtype or tensor.dtype
    if tensor.stride(0) >= tensor.stride(1):
        return torch.empty(tensor.shape, dtype=kind)
    return torch.empty_like(tensor.transpose(0, 1), dtype=kind, memory_format=torch.contiguous_format).transpose(0, 1)


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with any axes before its channels as (rows, tokens, channels), if possible as a view."""
    if tensor.dim() < 3:
        tensor = tensor.reshape(1, -1, tensor.shape[-1])
    return readable(tensor if tensor.dim() == 3 else tensor.flatten(0, -3))


def starts_of(documents_BL: Tensor | None) -> Tensor | None:
    """Return a dense boolean mask of the tokens that begin a document, one byte each; None without documents."""
    starts_BL = document_starts(documents_BL)
    if starts_BL is None:
        return None
    return starts_BL.contiguous()


def first_part(parts: Tensor) -> Tensor:
    """Return the first partial sum, to which the compiled code has added all others; zeros if there is none."""
    if len(parts):
        return parts[0]
    return parts.new_zeros(parts.shape[1:])


def scalar(dtype: torch.dtype) -> str:
    """Return the suffix of a compiled function's name for the type that it computes in."""
    if dtype == torch.float64:
        return "double"
    return "float"


def address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()
