"""A matrix product that accumulates into a sum, possibly of a wider type.

On a GPU one kernel does both: the sum is read and written once, and the product is never rounded to the narrower type.
On a CPU, and for a wider sum before torch 2.13, the product is computed first.

Legend as in `reference`.
"""

from __future__ import annotations

import torch
from packaging.version import Version
from torch import Tensor

from hybridtron.ops.product import ProductInputs, matrix_product

SUMS_WIDER = Version(torch.__version__).release >= (2, 13)
"""True if torch.compile can trace the shapes of a product that accumulates into a sum of another type."""


def add_product(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Add left right to the sum in place, and return the sum."""
    if not left_MK.is_cuda:
        return total_MN.add_(matrix_product(ProductInputs(left_MK, right_KN)))
    if total_MN.dtype == left_MK.dtype:
        return total_MN.addmm_(left_MK, right_KN)
    if not SUMS_WIDER:
        return total_MN.add_(left_MK @ right_KN)
    return torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, out=total_MN)
