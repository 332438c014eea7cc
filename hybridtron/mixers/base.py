"""Contract between a mixer and the code around it.

    forward(x_LBD, state, seq) -> Out(y_LBD, state, aux)

x is sequence first, as Megatron's parallel linears need it: L tokens, B rows, D width. The state is a value: the
incoming one is never modified, the outgoing one is new. None means the start of a document and equals a state of zeros;
a missing part means the same for that part. `aux` holds scalar losses to add to the training loss, by the names in the
spec's `auxiliary`. Each tensor-parallel rank returns its own value, and the loss is their mean.
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
"""A mixer's carried tensors by the names in its spec's `state_parts`, with lanes on the first axis; {} for none."""


class Out(NamedTuple):
    """Result of a mixer: its output, its new state and its auxiliary losses."""

    y_LBD: Tensor
    state: State
    aux: dict[str, Tensor]


class Mixer(nn.Module, ABC):
    """The body of a residual sub-layer, or one tensor-parallel rank's share of it.

    The constructor takes (spec, sizes, tensor) and leaves every weight uninitialised. The spec's parameter table
    defines how each weight is initialised and sharded, and `model/init.py` fills it.
    """

    selects: ClassVar[bool] = False
    """True if the scan's step sizes measure the weight of each token; evaluation then reports their entropy."""

    @abstractmethod
    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out: ...


def as_stored(projection: nn.Module, x_BLC: Tensor) -> Tensor:
    """Apply a projection without copying its input, whether rows or tokens come first in memory."""
    if x_BLC.stride(0) >= x_BLC.stride(1):
        return projection(x_BLC)
    return projection(x_BLC.transpose(0, 1)).transpose(0, 1)


def beside_as_stored(projection: nn.Module, x_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a projection without copying its input, and return the input too, for a second consumer.

    The projection must support `parallel/linear.beside`.
    """
    if x_BLC.stride(0) >= x_BLC.stride(1):
        return beside(projection, x_BLC)
    x_LBC, y_LBC = beside(projection, x_BLC.transpose(0, 1))
    return x_LBC.transpose(0, 1), y_LBC.transpose(0, 1)


def mixer_class(spec: MixerSpec | type[MixerSpec]) -> type[Mixer]:
    """Import the module class that a spec names."""
    file, _, name = spec.module.partition(":")
    return getattr(importlib.import_module(file), name)


def build_mixer(spec: MixerSpec, sizes: ModelSizes, tensor: TensorGroup) -> Mixer:
    """Build the module for a spec, with uninitialised weights."""
    return mixer_class(spec)(spec, sizes, tensor)
