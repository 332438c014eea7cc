"""DoRA: the adapter changes the direction of a projection's rows, and their lengths are learned separately.

    y = (|W| + M) / |W + s B A|  (W x + s B A x)          lengths of rows; M starts at zero

(Liu et al. 2024; s = alpha / rank.) M is the change of the lengths, so that the initial factor is exactly 1. The
length in the denominator gets no gradient (section 4.3 there). It is computed without adding the two matrices, per
row:

    |w + s b A|^2 = |w|^2 + s (2 A w + s A A^T b) b

Where the inputs are sharded, each rank has a part of the square, and the parts are all-reduced. Squares are summed in
fp64, so that every layout gets the same factors. A zero row stays zero: it has no direction.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.parallel.mesh import RankGroup


@torch.no_grad()
def row_lengths(weight: Tensor, A: Tensor, B: Tensor, scale: float, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Return the lengths of a projection's rows, without and with the adapter's product; `ranks` divide the inputs."""
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square()
    added = scale * (2 * (weight @ A.mT).double() + scale * (B @ (A @ A.mT)).double()) * B
    squared_lengths = torch.stack([squares, squares + added.sum(1)])
    if ranks.size > 1:
        dist.all_reduce(squared_lengths, group=ranks.group)
    before, after = squared_lengths.clamp_min(0).sqrt()
    return before, after


def factors(M: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the factor of each row; 0 for rows that are zero."""
    return (before.to(M.dtype) + M) / torch.where(after == 0, 1, after).to(M.dtype)
