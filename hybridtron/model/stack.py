"""The residual sub-layers in order. States go in and come out as values, keyed by the layer's index in the model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from hybridtron.config.architecture import Architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import State
from hybridtron.model.layer import Residual

States = dict[int, State]
"""One state per layer, by the layer's index in the whole model; layers without a state hold {}."""


class StackOut(NamedTuple):
    """The stream after the last sub-layer, every layer's new state, and the auxiliary losses summed by name."""

    x_LBD: Tensor
    states: States
    aux: dict[str, Tensor]


class Stack(nn.ModuleDict):
    """The sub-layers, by their index in the model."""

    def __init__(self, arch: Architecture, norm_eps: float) -> None:
        layers = {str(i): Residual(spec, arch.sizes, norm_eps) for i, spec in enumerate(arch.specs)}
        super().__init__(layers)

    def forward(self, x_LBD: Tensor, states: States | None, seq: SeqInfo) -> StackOut:
        new_states: States = {}
        total_aux: dict[str, Tensor] = {}
        for name, layer in self.items():
            state = None if states is None else states[int(name)]
            x_LBD, new_states[int(name)], aux = layer(x_LBD, state, seq)
            for key, loss in aux.items():
                total_aux[key] = total_aux[key] + loss if key in total_aux else loss
        return StackOut(x_LBD, new_states, total_aux)
