"""Single-process replacement of hybridtron's parallel linear layers, for the generated `mixers_hybridtron.py`.

Projections are only declared here. `layers_hybridtron.py` replaces each by calls of the model's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class OneProcess:
    """A tensor-parallel group of one process, which has all channels and heads."""

    size: int = 1
    rank: int = 0

    def share(self, total: int) -> int:
        return total

    def groups_used(self, heads: int, groups: int) -> slice:
        return slice(0, groups)

    def whole(self) -> OneProcess:
        return self

    def without_fp8(self) -> OneProcess:
        return self


TensorGroup = OneProcess
SINGLE_RANK = OneProcess()


@dataclass(frozen=True)
class Declared:
    """A projection without weights: its sizes alone."""

    in_features: int
    out_features: int


def column_parallel(in_features: int, out_features: int, tensor: OneProcess) -> Declared:
    return Declared(in_features, out_features)


row_parallel = column_parallel
row_parallel_inside = column_parallel
row_parallel_by_channel = column_parallel


def beside(projection: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input, for its other use, and its projection."""
    return x, projection(x)


def enter(x: Tensor, tensor: OneProcess) -> Tensor:
    """Return the input, since there is no other process."""
    return x


@dataclass(frozen=True)
class ProductInParts:
    """A projection whose output is split along its channels into parts of these sizes."""

    projection: Callable[[Tensor], Tensor]
    sizes: Sequence[int]


InParts = ProductInParts


def projected(x: Tensor, tensor: OneProcess, *projections: Callable[[Tensor], Tensor] | InParts) -> tuple[Tensor, ...]:
    """Apply several projections to one input; return their outputs, or the parts of these."""
    cuts = [item if isinstance(item, InParts) else InParts(item, ()) for item in projections]
    outputs = ((cut.projection(x), cut.sizes) for cut in cuts)
    return tuple(part for y, sizes in outputs for part in (y.split(sizes, -1) if sizes else (y,)))


leave = enter
sum_gradients = enter
sum_shares = enter
