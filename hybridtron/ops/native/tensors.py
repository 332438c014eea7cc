"""Descriptions of torch tensors for the compiled CPU functions: address, dtype, and row and token strides.

The first axis of a tensor has the rows (sequences in the batch), and the second axis has the tokens.

Legend: B rows, L tokens per row.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybridtron.ops.documents import document_starts

LOG2E = 1.4426950408889634
"""log2(e). The compiled recurrences compute exp(x) as 2^(LOG2E x)."""
# Maps each dtype that compiled functions can read to its number in the C++ code.
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


class Tokens(ctypes.Structure):
    """Description of a tensor (rows, tokens, ...), laid out as the struct `Tokens` in numbers.h.

    The axes after rows and tokens must be contiguous.

    data: the first element's address; null if there is no tensor
    kind: the dtype's number in KINDS
    row, token: the first two axes' strides, in elements
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
    """Return a reason if the compiled functions can't read one of the tensors' dtypes, else None.

    In messages, the reason follows the name of an op's implementation.
    """
    if all(tensor.dtype in KINDS for tensor in tensors):
        return None
    return "takes fp32, float64 and bf16"


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor with a dtype and strides that `Tokens` can describe, without a copy if possible.

    The tensor is converted to fp32 if its dtype is not in KINDS. It is made contiguous if the axes after rows and
    tokens are not contiguous.
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
    """Return an uninitialized tensor with the shape of `tensor`.

    If `tensor` is token-major in memory (its row stride is smaller than its token stride), the new tensor is also
    token-major. Otherwise it is row-major. Its dtype is `dtype`, or the dtype of `tensor` if `dtype` is None.
    """
    kind = dtype or tensor.dtype
    if tensor.stride(0) >= tensor.stride(1):
        return torch.empty(tensor.shape, dtype=kind)
    return torch.empty_like(tensor.transpose(0, 1), dtype=kind, memory_format=torch.contiguous_format).transpose(0, 1)


def as_rows(tensor: Tensor) -> Tensor:
    """Reshape a tensor (..., channels) to (rows, tokens, channels), and make it readable for `Tokens`.

    A tensor with fewer than three axes becomes one row. The result is a view if possible. It is fp32 if the tensor's
    dtype is not in KINDS.
    """
    if tensor.dim() < 3:
        tensor = tensor.reshape(1, -1, tensor.shape[-1])
    return readable(tensor if tensor.dim() == 3 else tensor.flatten(0, -3))


def starts_of(documents_BL: Tensor | None) -> Tensor | None:
    """Return a contiguous boolean mask for tokens that begin a document, or None if `documents_BL` is None.

    A row's first token is never marked, since it may continue a document from an earlier row.
    """
    starts_BL = document_starts(documents_BL)
    if starts_BL is None:
        return None
    return starts_BL.contiguous()


def first_part(parts: Tensor) -> Tensor:
    """Return the first partial sum, to which the compiled code has already added all other partial sums.

    If there are no partial sums, return zeros.
    """
    if len(parts):
        return parts[0]
    return parts.new_zeros(parts.shape[1:])


def scalar(dtype: torch.dtype) -> str:
    """Return the suffix of compiled functions' names for a dtype: "double" for float64, else "float"."""
    if dtype == torch.float64:
        return "double"
    return "float"


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element, or None if there is no tensor."""
    if tensor is None:
        return None
    return tensor.data_ptr()
