"""Residual sub-layers in order. States go in and come out as values, keyed by the layer's index in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridtron.architecture.table import Architecture
from hybridtron.config.schema import Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import State
from hybridtron.model.layer import Residual
from hybridtron.parallel.linear import TensorGroup

States = dict[int, State]
"""One state per layer, by the layer's index in the whole model; layers without a state hold {}.

Where states come in, a layer that is missing starts from zero.
"""


class StackOut(NamedTuple):
    """The stream after the last sub-layer, every layer's new state, and the auxiliary losses summed by name."""

    x_LBD: Tensor
    states: States
    aux: dict[str, Tensor]


class Stack(nn.ModuleDict):
    """The sub-layers of one chunk of the model, by their index in the whole model.

    With `recompute=layer` a sub-layer keeps its input alone and runs again in backward, from the same initial state;
    with `selective` those do that look along the sequence, and MLPs keep what they made.
    """

    def __init__(
        self, arch: Architecture, indices: range, norm_eps: float, tensor: TensorGroup, recompute: Recompute
    ) -> None:
        sizes = {i: replace(arch.sizes, layer=i) for i in indices}
        super().__init__({str(i): Residual(arch.specs[i], sizes[i], norm_eps, tensor.of_layer(i)) for i in indices})
        along_sequence = {str(i) for i in indices if arch.specs[i].state_parts(arch.sizes)}
        choices = {Recompute.none: set(), Recompute.selective: along_sequence, Recompute.layer: set(self)}
        self.recomputed: set[str] = choices[recompute]

    def forward(self, x_LBD: Tensor, states: States | None, seq: SeqInfo) -> StackOut:
        new_states: States = {}
        total_aux: dict[str, Tensor] = {}
        added_LBD: Tensor | None = None
        for name, layer in self.items():
            state = None if states is None else states.get(int(name))
            if name in self.recomputed and torch.is_grad_enabled():
                # added up outside of it, so that it keeps one tensor to run again from, and not two
                x_LBD = _whole(x_LBD, added_LBD)
                out = checkpoint(layer, x_LBD, None, state, seq, use_reentrant=False, preserve_rng_state=False)
            else:
                out = layer(x_LBD, added_LBD, state, seq)
            x_LBD, added_LBD, new_states[int(name)], aux = out
            for key, loss in aux.items():
                total_aux[key] = total_aux[key] + loss if key in total_aux else loss
        return StackOut(_whole(x_LBD, added_LBD), new_states, total_aux)


def _whole(x_LBD: Tensor, added_LBD: Tensor | None) -> Tensor:
    """The stream with what the sub-layer before adds to it."""
    return x_LBD if added_LBD is None else x_LBD + added_LBD
