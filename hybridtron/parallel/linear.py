"""The linear layers that mixers are built from, named by how they will be cut over tensor-parallel ranks.

A column-parallel layer makes outputs that stay on their rank; a row-parallel layer takes such inputs and sums over
ranks. On one process both are plain matrix products. Weights are left uninitialised (see `model/init.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """x @ weight.T, without a bias: no projection of these models has one."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def column_parallel(in_features: int, out_features: int) -> Linear:
    """Each rank makes its own share of the outputs."""
    return Linear(in_features, out_features)


def row_parallel(in_features: int, out_features: int) -> Linear:
    """Each rank holds its own share of the inputs; the outputs are summed over ranks."""
    return Linear(in_features, out_features)


class Embedding(nn.Module):
    """Token vectors; the rows of its weight can serve as the output head too."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)
