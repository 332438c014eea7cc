"""Transformer Engine's linear layers in the place of megatron-core's, for a run that asks for them.

Each rank's product is Transformer Engine's; what happens between ranks stays as in `linear.py`. Tested against a
stand-in for the package only: not yet run with the real one, which needs a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from hybridtron.device import optional_package


def local_linear(in_features: int, out_features: int) -> nn.Module:
    """One rank's product, without a bias, uninitialised as all our layers."""
    return _linear()(in_features, out_features, bias=False, params_dtype=torch.get_default_dtype())


def summed_linear(in_features: int, out_features: int, group: Any, sequence: bool) -> nn.Module:
    """One rank's product, summed over the ranks of a group, and scattered by tokens if `sequence`."""

    base: Any = _linear()

    class Summed(base):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if sequence:
                return reduce_scatter_to_sequence_parallel_region(y, group=group)
            return reduce_from_tensor_model_parallel_region(y, group=group)

    return Summed(in_features, out_features, bias=False, params_dtype=torch.get_default_dtype())


@functools.cache
def _linear() -> Any:
    package = optional_package("transformer_engine.pytorch")
    if package.module is None:
        raise RuntimeError(f"parallel.transformer_engine=true needs transformer_engine, which is {package.reason}")
    return package.module.Linear
