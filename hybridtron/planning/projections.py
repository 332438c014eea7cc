"""The projections of a sub-layer in a phase: which of them read its input, which write to the stream, which learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridtron.architecture.adapters import adapter_key, is_projection
from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import ResolvedPhase


@dataclass(frozen=True)
class WeightUse:
    """A weight of two axes, and the A of the adapter beside it."""

    weight: Parameter
    learns: bool
    adapter: Parameter | None

    @property
    def leaves(self) -> bool:
        """Whether its inputs are shared out over ranks, as those of the last projection are."""
        return any(cut.axis == 1 for cut in self.weight.cuts)

    @property
    def keeps_input(self) -> bool:
        """Whether a gradient needs what it reads."""
        return self.learns or self.adapter is not None


@dataclass(frozen=True)
class SublayerWeights:
    """Of one sub-layer."""

    every: tuple[WeightUse, ...]
    width: int  # of what the sub-layer reads

    @property
    def entering(self) -> list[WeightUse]:
        """Those that read the sub-layer's input."""
        return [one for one in self.every if one.weight.shape[1] == self.width and not one.leaves]

    @property
    def adapted(self) -> bool:
        """Whether an adapter reads the sub-layer's input."""
        return any(one.adapter is not None for one in self.entering)

    @property
    def leaving(self) -> list[WeightUse]:
        """The large ones that read what the mixer has made."""
        return [one for one in self.every if one.weight.fp8 and one.leaves]


def projections_of(phase: ResolvedPhase, table: Mapping[str, Parameter], layer: int) -> SublayerWeights:
    """Of a sub-layer; weights that it shares with others are among them."""
    arch = architecture(phase.model)
    found = tuple(
        WeightUse(table[name], phase.learns(name), table.get(adapter_key(name, "A")))
        for name, weight in arch.mixer_weights(layer).items()
        if is_projection(name, weight)
    )
    return SublayerWeights(found, arch.specs[layer].input_width(arch.sizes))
