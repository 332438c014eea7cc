"""A matrix multiplication whose result is added in place to a tensor of the same or a higher precision.

On a GPU, one kernel multiplies and adds. It reads and writes the tensor once, and does not round the product to the
dtype of its factors. In two cases, the product is computed first and then added:

    on a CPU
    if the tensor has another dtype than the factors, and torch is older than 2.13

Legend: the factors are (M, K) and (K, N).
"""

from __future__ import annotations

import torch
from packaging.version import Version
from torch import Tensor

from hybridtron.ops.product import ProductInputs, matrix_product

SUMS_WIDER = Version(torch.__version__).release >= (2, 13)
"""True if torch.compile can trace torch.addmm with an output of another dtype than the factors."""


def add_product(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Add the matrix product of left and right to `total_MN` in place, and return `total_MN`."""
    if not left_MK.is_cuda:
        return total_MN.add_(matrix_product(ProductInputs(left_MK, right_KN)))
    if total_MN.dtype == left_MK.dtype:
        return total_MN.addmm_(left_MK, right_KN)
    if not SUMS_WIDER:
        return total_MN.add_(left_MK @ right_KN)
    return torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, out=total_MN)
