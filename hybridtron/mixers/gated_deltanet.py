"""Gated DeltaNet (equations in `architecture/gated_deltanet.py`): the delta rule with one decay per head.

Legend: B rows (sequences), L tokens, H heads on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.gated_deltanet import GatedDeltaNetSpec
from hybridtron.mixers.delta_rule import DeltaRule
from hybridtron.parallel.linear import TensorGroup, column_parallel


class GatedDeltaNet(DeltaRule):
    """The delta rule with one decay per head; one projection computes the decays and step sizes of all heads."""

    def __init__(self, spec: GatedDeltaNetSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.ab_proj = column_parallel(sizes.width, 2 * spec.heads, tensor.without_fp8())

    def other_input_layers(self) -> Sequence[nn.Module]:
        return (self.ab_proj,)

    def decays_and_steps(self, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        a_LBH, b_LBH = others[-1].chunk(2, dim=-1)
        return a_LBH, b_LBH
