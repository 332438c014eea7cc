"""Tensors as the compiled functions see them: an address, a type, and how far rows and tokens lie apart."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts

LOG2E = 1.4426950408889634
"""Decays come to the compiled functions as powers of two."""
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


class Tokens(ctypes.Structure):
    """(rows, tokens, ...), whose further axes are dense: `Tokens` in numbers.h. Without a tensor, a null address."""

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


def readable(tensor: Tensor) -> Tensor:
    """The same numbers as `Tokens` can describe them: rows and tokens anywhere, and what follows dense."""
    if tensor.dtype not in KINDS:
        tensor = tensor.float()
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for as many numbers, rows and tokens in the same order in memory."""
    kind = dtype or tensor.dtype
    if tensor.stride(0) >= tensor.stride(1):
        return torch.empty(tensor.shape, dtype=kind)
    return torch.empty_like(tensor.transpose(0, 1), dtype=kind, memory_format=torch.contiguous_format).transpose(0, 1)


def as_rows(tensor: Tensor) -> Tensor:
    """(rows, tokens, channels) of a tensor of any axes, the last one channels; a view where there is one."""
    if tensor.dim() < 3:
        tensor = tensor.reshape(1, -1, tensor.shape[-1])
    return readable(tensor if tensor.dim() == 3 else tensor.flatten(0, -3))


def starts_of(documents_BL: Tensor | None) -> Tensor | None:
    """Which tokens begin a document, as bytes in a row."""
    starts_BL = document_starts(documents_BL)
    return None if starts_BL is None else starts_BL.contiguous()


def first_part(parts: Tensor) -> Tensor:
    """The part that all others were added to; zeros where there was nothing to add up."""
    return parts[0] if len(parts) else parts.new_zeros(parts.shape[1:])


def scalar(dtype: torch.dtype) -> str:
    """The ending of a function's name, by the type that it computes in."""
    return "double" if dtype == torch.float64 else "float"


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
