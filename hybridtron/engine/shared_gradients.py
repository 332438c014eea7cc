"""Sum gradients over pipeline stages, for weights that several sub-layers of a letter share.

Each stage with such a sub-layer has a copy of the weight. All copies start equal and receive the same summed gradient,
so they stay equal. Data-parallel sums come first. Such weights have their own buckets, like a tied embedding, so that
with the distributed optimizer each data-parallel rank has the same entries of a weight on every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hybridtron.parallel.mesh import RankGroup


@dataclass
class SharedGradients:
    """Shared weights by name, with the shapes of their tensor-parallel shards and their gradients' dtypes.

    `pipeline` are the ranks that sum them.
    """

    shapes: Mapping[str, Sequence[int]]
    dtypes: Mapping[str, torch.dtype]
    pipeline: RankGroup
    learning: list[str] | None = field(default=None, init=False)  # the trained ones' names, after the first step

    def sum_over_stages(self, weights: Mapping[str, Any], device: torch.device) -> None:
        """All-reduce the shared gradients over stages; `weights` are those that this rank holds.

        All ranks of a pipeline must call this together. Ranks without a weight contribute zeros.
        """
        group = self.pipeline.group
        if self.learning is None:
            flags = [name in weights and weights[name].requires_grad for name in self.shapes]
            learns = torch.tensor(flags, dtype=torch.int32, device=device)
            dist.all_reduce(learns, op=dist.ReduceOp.MAX, group=group)
            self.learning = [name for name, is_trained in zip(self.shapes, learns.tolist(), strict=True) if is_trained]
        for dtype in dict.fromkeys(self.dtypes[name] for name in self.learning):
            names = [name for name in self.learning if self.dtypes[name] == dtype]
            gradients: list[Tensor] = [
                weights[name].main_grad
                if name in weights
                else torch.zeros(tuple(self.shapes[name]), dtype=dtype, device=device)
                for name in names
            ]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(summed)
