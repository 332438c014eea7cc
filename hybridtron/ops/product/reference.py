"""Matrix products as torch computes them: by MKL on most CPUs, by cuBLAS on CUDA.

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
    """The input and the weight of a projection."""

    x_TI: Tensor
    weight_OI: Tensor


class ProductInputs(NamedTuple):
    """Both factors of a product, and optionally a tensor that the product may be written to."""

    left_MK: Tensor
    right_KN: Tensor
    room_MN: Tensor | None = None


def linear(inputs: LinearInputs) -> Tensor:
    """Return x weight^T."""
    return functional.linear(*inputs)


def matrix_product(inputs: ProductInputs) -> Tensor:
    """Return left right, written to `room_MN` if it is given."""
    return torch.mm(inputs.left_MK, inputs.right_KN, out=inputs.room_MN)
