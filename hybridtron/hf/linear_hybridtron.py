"""What `mixers_hybridtron.py` finds where hybridtron has its parallel layers: one process, which holds everything.

A projection is only declared here. `layers_hybridtron.py` puts the model's own layers in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class OneProcess:
    """A single process, with all channels and heads."""

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
    """A projection without weights."""

    in_features: int
    out_features: int


def column_parallel(in_features: int, out_features: int, tensor: OneProcess) -> Declared:
    return Declared(in_features, out_features)


row_parallel = column_parallel
row_parallel_inside = column_parallel
row_parallel_by_channel = column_parallel


def beside(projection: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is projected, for its other use, and the product."""
    return x, projection(x)


def enter(x: Tensor, tensor: OneProcess) -> Tensor:
    """Nothing is on other processes."""
    return x


def projected(x: Tensor, tensor: OneProcess, *projections: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """What projections make of one input."""
    return tuple(projection(x) for projection in projections)


leave = enter
sum_gradients = enter
sum_shares = enter
