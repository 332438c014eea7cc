"""Kimi Delta Attention (equations in `architecture/kda.py`): the delta rule with a decay per key channel.

Legend: B rows (sequences), L tokens, H heads on this rank, R inner channels of the low-rank projection to decays.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.kda import KDASpec
from hybridtron.mixers.delta_rule import DeltaRule
from hybridtron.parallel.linear import TensorGroup, column_parallel


class KDA(DeltaRule):
    """The delta rule with a decay per key channel.

    One low-rank projection computes the decays, and another computes the output gate. Every tensor-parallel rank
    computes all inner channels of both.
    """

    gate_is_sigmoid = True

    def __init__(self, spec: KDASpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        (keys, values), rank, plain = spec.channels(sizes), spec.rank(sizes), tensor.without_fp8()
        self.decay_down = column_parallel(sizes.width, rank, plain.whole())
        self.decay_up = column_parallel(rank, keys, plain)
        self.b_proj = column_parallel(sizes.width, spec.heads, plain)
        self.gate_down = column_parallel(sizes.width, rank, plain.whole())
        self.gate_up = column_parallel(rank, values, plain)

    def other_input_layers(self) -> Sequence[nn.Module]:
        return self.gate_down, self.decay_down, self.b_proj

    def output_gate(self, others: Sequence[Tensor]) -> Tensor:
        return self.gate_up(others[0])

    def decays_and_steps(self, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        _, decays_LBR, steps_LBH = others
        return self.decay_up(decays_LBR), steps_LBH
