"""Matrix multiplications by torch, which uses MKL on most CPUs and cuBLAS on CUDA.

    linear:          y = x weight^T, over the last axis of x; supports autograd
    matrix_product:  (M, K) times (K, N); does not support autograd

Legend: T any leading axes, I input channels, O output channels; M, K and N are the sizes of two factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class LinearInputs(NamedTuple):
    """The input and the weight of a projection."""

    x_TI: Tensor
    weight_OI: Tensor


class ProductInputs(NamedTuple):
    """Both factors, and optionally `room_MN`: a tensor to which an implementation may write the result."""

    left_MK: Tensor
    right_KN: Tensor
    room_MN: Tensor | None = None


def linear(inputs: LinearInputs) -> Tensor:
    """Return x weight^T."""
    return functional.linear(*inputs)


def matrix_product(inputs: ProductInputs) -> Tensor:
    """Return the matrix product left right. If `room_MN` is given, the result is written to it and returned."""
    return torch.mm(inputs.left_MK, inputs.right_KN, out=inputs.room_MN)
