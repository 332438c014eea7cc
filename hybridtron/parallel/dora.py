"""DoRA (Liu et al. 2024): a low-rank adapter for the directions of a weight's rows, and a vector for their lengths.

    y = (|W| + M) / |W + s B A|  (W x + s B A x)

x is the layer's input, y is its output, and W is its frozen weight. A and B are the adapter's matrices, and the factor
s = alpha / rank. |X| is the vector with the row lengths (Euclidean norms) of a matrix X. M is a learned vector, which
is added to W's row lengths. M and B start at zero, so that the initial factor is exactly 1.

The denominator gets no gradient (the paper's section 4.3). It is computed without forming W + s B A. For each row w in
W and the corresponding row b in B:

    |w + s A^T b|^2 = |w|^2 + s b . (2 A w + s A A^T b)

If ranks divide the input channels, each rank computes the right-hand side with its columns of W and A, and the results
are all-reduced. Squares are summed in fp64, so that every layout gets the same factors. If a row in W + s B A is zero,
its output is zero with any factor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.parallel.mesh import RankGroup


@torch.no_grad()
def row_lengths(weight: Tensor, A: Tensor, B: Tensor, scale: float, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Return the row lengths |W| and |W + s B A|; `ranks` divide the input channels."""
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square()
    added = scale * (2 * (weight @ A.mT).double() + scale * (B @ (A @ A.mT)).double()) * B
    squared_lengths = torch.stack([squares, squares + added.sum(1)])
    if ranks.size > 1:
        dist.all_reduce(squared_lengths, group=ranks.group)
    before, after = squared_lengths.clamp_min(0).sqrt()
    return before, after


def factors(M: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the factor (before + M) / after for each row, where `before` is |W| and `after` is |W + s B A|.

    Where `after` is 0, the output channel is 0 as well, and 1 is used as denominator.
    """
    return (before.to(M.dtype) + M) / torch.where(after == 0, 1, after).to(M.dtype)
