"""Gradients of weights that several stages hold, as places of a letter share them: summed over these stages.

Each stage has a copy, which starts as the others do and gets the same sum, and so stays the same. Data-parallel sums
come first: such weights have buckets of their own, as a tied embedding has, so that with the distributed optimizer each
data-parallel rank has the same entries of a weight on every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


@dataclass
class SharedGradients:
    """The weights, by name: what a rank holds of each, and the type in which gradients are added up."""

    shapes: Mapping[str, Sequence[int]]
    dtypes: Mapping[str, torch.dtype]
    learning: list[str] | None = field(default=None, init=False)  # known after the first step

    def sum_over_stages(self, weights: Mapping[str, Any], device: torch.device) -> None:
        """Of the weights that this rank holds; all ranks of a pipeline call it together."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if self.learning is None:
            flags = [name in weights and weights[name].requires_grad for name in self.shapes]
            learns = torch.tensor(flags, dtype=torch.int32, device=device)
            dist.all_reduce(learns, op=dist.ReduceOp.MAX, group=group)
            self.learning = [name for name, one in zip(self.shapes, learns.tolist(), strict=True) if one]
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
