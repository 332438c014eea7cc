"""DoRA: an adapter changes the direction of a projection's rows, and their lengths are learned by themselves.

    y = (|W| + M) / |W + s B A|  (W x + s B A x)          lengths of rows; M starts at zero

(Liu et al. 2024; s = alpha / rank.) M is what the lengths have changed by, so that at first the factor is 1, bit for
bit. The length that it divides by gets no gradient (section 4.3 there). It is made without the sum of both matrices:

    |w + s b A|^2 = |w|^2 + s (2 A w + s A A^T b) b       of one row

Where the inputs are cut, ranks have a part of each square; these are summed. Squares are added up in fp64, so that
every layout has the same factors. A row that is zero stays zero: it has no direction.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.parallel.cut import RankGroup


@torch.no_grad()
def row_lengths(weight: Tensor, A: Tensor, B: Tensor, scale: float, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Of a projection's rows, without and with an adapter's product; `ranks` share the inputs."""
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square()
    added = scale * (2 * (weight @ A.mT).double() + scale * (B @ (A @ A.mT)).double()) * B
    both = torch.stack([squares, squares + added.sum(1)])
    if ranks.size > 1:
        dist.all_reduce(both, group=ranks.group)
    before, after = both.clamp_min(0).sqrt()
    return before, after


def factors(M: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """What rows are multiplied by; 0 for those that are zero."""
    return (before.to(M.dtype) + M) / torch.where(after == 0, 1, after).to(M.dtype)
