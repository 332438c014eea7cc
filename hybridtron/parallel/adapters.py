"""What low-rank adapters compute, beside any of the linear layers (rows and cuts: `architecture/adapters.py`).

A layer adds its adapter's outputs to its own before these are summed over ranks, so that both are summed at once.
Mixers do not know of them: an adapter is attached to a layer when the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.architecture.adapters import AdaptedPart, AdaptersConfig, adapted_projections
from hybridtron.architecture.base import Parameter


@dataclass(frozen=True)
class AdapterSizes:
    """Of one rank's share of an adapter: its inputs, the parts of its outputs, and what these are multiplied by."""

    inputs: int
    parts: Sequence[AdaptedPart]
    rank: int
    scale: float


class Adapter(nn.Module):
    """scale B A x, for each part of the outputs that has a pair of its own; zeros for the others."""

    def __init__(self, sizes: AdapterSizes) -> None:
        super().__init__()
        self.sizes = sizes
        rows = [part.rows for part in sizes.parts if part.adapted]
        self.A = nn.Parameter(torch.empty(len(rows) * sizes.rank, sizes.inputs))
        self.B = nn.Parameter(torch.empty(sum(rows), sizes.rank))

    def forward(self, x: Tensor) -> Tensor:
        inner = (functional.linear(x, self.A) * self.sizes.scale).split(self.sizes.rank, -1)
        rows_of = self.B.split([part.rows for part in self.sizes.parts if part.adapted])
        pairs = zip(inner, rows_of, strict=True)
        made = [
            functional.linear(*next(pairs)) if part.adapted else x.new_zeros(*x.shape[:-1], part.rows)
            for part in self.sizes.parts
        ]
        return made[0] if len(made) == 1 else torch.cat(made, -1)


def attach_adapters(
    model: nn.Module, table: Mapping[str, Parameter], adapters: AdaptersConfig | None, tensor: int
) -> None:
    """Beside the layers of a model, or of a part of it, on one of this number of tensor-parallel ranks.

    From then on a layer adds its adapter's outputs to its own.
    """
    layers = dict(model.named_modules())
    for name, parts in adapted_projections(table, adapters).items():
        if (layer := layers.get(name.removesuffix(".weight"))) is None:
            continue
        assert adapters is not None
        cut = table[name].cut_over("tensor", tensor)
        ranks = tensor if cut is not None and cut.axis == 0 else 1
        own = [replace(part, rows=part.rows // ranks) for part in parts]
        inputs = table[name].share_shape({"tensor": tensor})[1]
        layer.add_module("adapter", Adapter(AdapterSizes(inputs, own, adapters.rank, adapters.alpha / adapters.rank)))
        if not getattr(layer, "sums_inside", False):
            layer.register_forward_hook(_add, prepend=True)  # before the hook that sums over ranks


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter that is attached to a layer, if there is one."""
    return layer._modules.get("adapter")  # type: ignore[return-value]


def _add(layer: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """To the product; `BranchingLinear` hands out its input before it."""
    adapter = adapter_of(layer)
    assert adapter is not None
    if isinstance(out, tuple):
        x, y = out
        return x, y + adapter(given[0])
    return out + adapter(given[0])
