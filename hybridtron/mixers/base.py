"""Contract between a mixer and the code around it.

    forward(x_LBD, state, seq) -> MixerOutput(y_LBD, state, aux, routed)

x and y have the tokens first, as Megatron's parallel linears need it: L tokens, B rows (sequences in the batch), D
width. `forward` never modifies its argument `state`, but returns a new state. A state that is None stands for zeros, as
at a document's start. A part that is missing in a state stands for zeros too.

`aux` maps each name in the spec's `auxiliary` to a loss: a scalar, or one loss for each row (B,). A loss counts once
for each loss token: a scalar for those of the batch, a row's loss for those of the row. Each tensor-parallel rank
returns its own value for such a loss; the mean of these values is added to the training loss.

`routed` counts a router's choices in training. Counts are results, not attributes of the module: a forward pass that is
repeated in the backward pass (`parallel.recompute`) would count twice.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.data.batch import SeqInfo
from hybridtron.parallel.linear import TensorGroup, project_with_input

State = dict[str, Tensor]
"""A mixer's state: name of a part in the spec's `state_parts` -> tensor with rows on the first axis.

A mixer without a state returns {}.
"""


class Routed(NamedTuple):
    """The choices of a router in one forward pass, over the tokens that this rank has.

    loads_E: number of choices that fell on each of E experts, in int64; every tensor-parallel rank has the same
    entropy: sum over tokens of the entropy of the router's scores, in float64 and nats
    dropped: number of choices beyond the experts' capacity, in int64; the loads count them too
    """

    loads_E: Tensor
    entropy: Tensor
    dropped: Tensor


class MixerOutput(NamedTuple):
    """A mixer's result: its output, its new state, its auxiliary losses, and its router's choices if it has a router.

    Auxiliary losses and choices are for training only: there are none if `SeqInfo.key` is None.
    """

    y_LBD: Tensor
    state: State
    aux: dict[str, Tensor]
    routed: Routed | None = None


class Mixer(nn.Module, ABC):
    """Base class for mixers: the body of a residual sub-layer, or one tensor-parallel rank's shard of it.

    The constructor takes (spec, sizes, tensor) and leaves every weight uninitialised. The spec's parameter table
    defines how each weight is initialised and sharded, and `model/init.py` fills the weights.
    """

    has_selective_steps: ClassVar[bool] = False
    """True if the mixer's step sizes say how strongly each token enters the state; evaluation reports their entropy."""

    @abstractmethod
    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput: ...


def apply_in_layout(projection: nn.Module, x_BLC: Tensor) -> Tensor:
    """Apply a projection without copying its input (B, L, C), whether rows or tokens come first in memory."""
    if x_BLC.stride(0) >= x_BLC.stride(1):
        return projection(x_BLC)
    return projection(x_BLC.transpose(0, 1)).transpose(0, 1)


def apply_with_input_in_layout(projection: nn.Module, x_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and its projection, without copying the input, whether rows or tokens come first in memory.

    A caller that uses the input again must use the returned input: the gradients of both uses are then added in place.
    The projection must support `parallel/linear.project_with_input`.
    """
    if x_BLC.stride(0) >= x_BLC.stride(1):
        return project_with_input(projection, x_BLC)
    x_LBC, y_LBC = project_with_input(projection, x_BLC.transpose(0, 1))
    return x_LBC.transpose(0, 1), y_LBC.transpose(0, 1)


def mixer_class(spec: MixerSpec | type[MixerSpec]) -> type[Mixer]:
    """Import the module class that a spec names."""
    file, _, name = spec.module.partition(":")
    return getattr(importlib.import_module(file), name)


def build_mixer(spec: MixerSpec, sizes: ModelSizes, tensor: TensorGroup) -> Mixer:
    """Build the module for a spec, with uninitialised weights."""
    return mixer_class(spec)(spec, sizes, tensor)
