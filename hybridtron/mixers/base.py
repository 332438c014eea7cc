"""The contract between a mixer and everything around it.

    forward(x_LBD, state, seq) -> Out(y_LBD, state, aux)

x is sequence first, as Megatron's parallel linears want it: L tokens, B rows, D width. The state is a value: what
comes in is never changed, what comes out is new. None stands for the start of a document, and equals a state of
zeros; so does a part that is missing from what comes in. `aux` holds scalar losses that the mixer wants added to the
training loss, by the names in its spec's `auxiliary`: the mean of what each tensor-parallel rank has is the loss.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.data.batch import SeqInfo
from hybridtron.parallel.linear import TensorGroup, beside

State = dict[str, Tensor]
"""A mixer's carried tensors by the names in its spec's `state_parts`, lanes on the first axis; {} for none."""


class Out(NamedTuple):
    """What a mixer gives back."""

    y_LBD: Tensor
    state: State
    aux: dict[str, Tensor]


class Mixer(nn.Module, ABC):
    """A residual sub-layer's body, or one tensor-parallel rank's share of it.

    Its constructor takes (spec, sizes, tensor) and leaves every weight uninitialised: the spec's parameter table says
    how each starts and how it is cut, and `model/init.py` fills it.
    """

    selects: ClassVar[bool] = False
    """Whether the step sizes of its scan say how much a token counts: evaluation then takes their entropy."""

    @abstractmethod
    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out: ...


def as_stored(projection: nn.Module, x_BLC: Tensor) -> Tensor:
    """The projection of every token, with rows and tokens in the order that they have in memory: nothing is copied."""
    if x_BLC.stride(0) >= x_BLC.stride(1):
        return projection(x_BLC)
    return projection(x_BLC.transpose(0, 1)).transpose(0, 1)


def beside_as_stored(projection: nn.Module, x_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a projection that is called by `beside`, and before it the tokens for their other use."""
    if x_BLC.stride(0) >= x_BLC.stride(1):
        return beside(projection, x_BLC)
    x_LBC, y_LBC = beside(projection, x_BLC.transpose(0, 1))
    return x_LBC.transpose(0, 1), y_LBC.transpose(0, 1)


def mixer_class(spec: MixerSpec | type[MixerSpec]) -> type[Mixer]:
    """The module that a spec names."""
    file, _, name = spec.module.partition(":")
    return getattr(importlib.import_module(file), name)


def build_mixer(spec: MixerSpec, sizes: ModelSizes, tensor: TensorGroup) -> Mixer:
    """The module of a spec, its weights not yet filled."""
    return mixer_class(spec)(spec, sizes, tensor)
