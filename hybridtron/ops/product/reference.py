"""Matrix products as torch makes them: by MKL on most CPUs, by cuBLAS on CUDA.

    linear:          y = x weight^T, over the last axis of x
    matrix_product:  left right, without gradients of its own

Legend: T any leading axes, I and O channels in and out, M, K, N of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class LinearInputs(NamedTuple):
    """What is projected, and the weight."""

    x_TI: Tensor
    weight_OI: Tensor


class ProductInputs(NamedTuple):
    """Both factors, and where the product may be written."""

    left_MK: Tensor
    right_KN: Tensor
    room_MN: Tensor | None = None


def linear(inputs: LinearInputs) -> Tensor:
    """x weight^T."""
    return functional.linear(*inputs)


def matrix_product(inputs: ProductInputs) -> Tensor:
    """left right."""
    return torch.mm(inputs.left_MK, inputs.right_KN, out=inputs.room_MN)
