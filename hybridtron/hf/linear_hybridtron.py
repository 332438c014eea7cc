"""Single-process replacement of hybridtron's parallel linear layers, for the generated `mixers_hybridtron.py`.

hybridtron's mixers build projections that tensor-parallel ranks divide. An exported model runs in a single process, and
its projections are declared here without weights. `layers_hybridtron.py` replaces each projection by calls of the
model's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn


@dataclass(frozen=True)
class OneProcess:
    """A tensor-parallel group of one process, which has all channels and heads."""

    size: int = 1
    rank: int = 0
    routes_own_tokens: bool = False

    @property
    def expert_ranks(self) -> OneOwner:
        return OneOwner(self, self)

    def share(self, total: int) -> int:
        return total

    def groups_used(self, heads: int, groups: int) -> slice:
        return slice(0, groups)

    def whole(self) -> OneProcess:
        return self

    def without_fp8(self) -> OneProcess:
        return self


@dataclass(frozen=True)
class OneOwner:
    """One process, which has all experts and all inner channels of each."""

    expert: OneProcess
    tensor: OneProcess


TensorGroup = OneProcess
SINGLE_RANK = OneProcess()


@dataclass(frozen=True)
class Declared:
    """Sizes of a projection, which has no weights here."""

    in_features: int
    out_features: int


def column_parallel(in_features: int, out_features: int, tensor: OneProcess) -> Declared:
    return Declared(in_features, out_features)


row_parallel = column_parallel
row_parallel_inside = column_parallel
row_parallel_by_channel = column_parallel


def project_with_input(projection: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and its projection. Callers use the returned input, as hybridtron's own function requires."""
    return x, projection(x)


def gather_input(x: Tensor, tensor: OneProcess) -> Tensor:
    """Return the input, since there is no other process."""
    return x


@dataclass(frozen=True)
class SplitProduct:
    """A projection, and the sizes of the parts into which its output channels are split; empty for no split."""

    projection: Callable[[Tensor], Tensor]
    sizes: Sequence[int]


SplitProjection = SplitProduct


def project_all(
    x: Tensor, tensor: OneProcess, *projections: Callable[[Tensor], Tensor] | SplitProjection
) -> tuple[Tensor, ...]:
    """Apply several projections to one input; return their outputs. A SplitProjection has an output for each part."""
    cuts = [item if isinstance(item, SplitProjection) else SplitProjection(item, ()) for item in projections]
    outputs = ((cut.projection(x), cut.sizes) for cut in cuts)
    return tuple(part for y, sizes in outputs for part in (y.split(sizes, -1) if sizes else (y,)))


gather_output = gather_input
sum_output = gather_input
all_reduce_gradients = gather_input
all_reduce_sum = gather_input


SentRows = NoReturn


def send_to_owners(*_: Any) -> NoReturn:
    raise NotImplementedError("experts are not divided over ranks here")


outputs_of_owners = send_to_owners
