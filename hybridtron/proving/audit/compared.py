"""Differences between the audit's two sides: the allowed and the actual ones.

The two sides round differently, because sums over ranks have another order. The effect depends on the model: a query
that is nearly orthogonal to the only key it sees makes a head's output nearly 0, and the norm after it enlarges the
output's rounding by as much. So in fp32, if a difference exceeds the limit, the serial step is repeated from weights
that are moved by about their last bit. A number that changes by this may differ by a multiple of its change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridtron.architecture.table import parameter_table
from hybridtron.config.schema import Config
from hybridtron.parallel.cut import cut
from hybridtron.parallel.mesh import Mesh, single_rank


@dataclass(frozen=True)
class AuditPrecision:
    """A compute type with its settings: optimizer, start, and limits of the difference.

    The limit of |difference| is `relative` times the tensor's norm, plus `absolute` times the largest norm of its kind,
    plus `rounding` times the tensor's change when the starting weights are moved by about their last bit.
    """

    name: str
    dtype: torch.dtype
    distributed_optimizer: bool
    noisy_start: bool
    clip: bool
    relative: float
    absolute: float
    rounding: float


PRECISIONS = (
    AuditPrecision("float64", torch.float64, False, True, False, 1e-9, 1e-13, 0.0),
    AuditPrecision("fp32", torch.float32, True, False, True, 1e-5, 1e-7, 2.0),
)
MOVES = 3
"""Number of times that weights are moved; the largest change counts, because a single one may cancel by chance."""


NORM_RELATIVE = 1e-6
"""Allowed difference of the gradient norm: megatron-core sums it in fp32 for gradients of any type."""


@dataclass(frozen=True)
class Step:
    """Results of one training step. The weights are those after it; on a rank, its shards."""

    loss: float
    grad_norm: float
    loss_after: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    auxiliary: Mapping[str, float]
    meshes: Mapping[str, Mesh] = field(default_factory=single_rank)


@dataclass(frozen=True)
class Disagreement:
    """Difference between a number or tensor and the serial one, relative to its norm and as a multiple of the limit."""

    what: str
    relative: float
    of_limit: float

    @property
    def passes(self) -> bool:
        return self.of_limit <= 1.0  # False for nan

    @property
    def is_tensor(self) -> bool:
        return self.what.startswith(("gradient of", "weight"))


def differences(
    truth: Step, ranks: list[Step], config: Config, precision: AuditPrecision, moved: Sequence[Step] = ()
) -> Iterator[Disagreement]:
    """Yield the differences of losses and full gradients on the first rank, and of the weights on every rank.

    `moved` are serial steps from weights moved by their last bit.
    """
    in_fp32 = replace(precision, relative=max(precision.relative, NORM_RELATIVE))
    for name, limits in (("loss", precision), ("grad_norm", in_fp32), ("loss_after", precision)):
        value, expected, *changed = (_number(getattr(step, name)) for step in (ranks[0], truth, *moved))
        yield _difference(name.replace("_", " "), value, expected, 0.0, limits, changed)
    assert truth.auxiliary.keys() == ranks[0].auxiliary.keys()
    for name in truth.auxiliary:
        value, expected, *changed = (_number(step.auxiliary[name]) for step in (ranks[0], truth, *moved))
        yield _difference(f"auxiliary {name}", value, expected, 0.0, precision, changed)
    largest = _largest_norm(truth.gradients)
    assert truth.gradients.keys() == ranks[0].gradients.keys()
    for name, expected in truth.gradients.items():
        changed = [step.gradients[name] for step in moved]
        yield _difference(f"gradient of {name}", ranks[0].gradients[name], expected, largest, precision, changed)
    table = parameter_table(config.model)
    largest = _largest_norm(truth.weights)
    for rank, step in enumerate(ranks):
        for name, value in step.weights.items():
            mesh = step.meshes[table[name].family]
            expected, *changed = (cut(serial.weights[name], table[name], mesh) for serial in (truth, *moved))
            yield _difference(f"weight {name} on rank {rank}", value, expected, largest, precision, changed)


def _largest_norm(tensors: Mapping[str, Tensor]) -> float:
    return max(float(tensor.norm()) for tensor in tensors.values())


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _difference(
    what: str, found: Tensor, expected: Tensor, largest: float, precision: AuditPrecision, moved: Sequence[Tensor]
) -> Disagreement:
    """Compare a tensor with the expected one, by the precision's limits.

    `largest` is the largest norm of its kind. `moved` are expected tensors of steps from moved weights.
    """
    difference = _distance(found, expected)
    norm = float(expected.double().norm())
    limit = precision.relative * norm + precision.absolute * largest
    limit += precision.rounding * max((_distance(moved_tensor, expected) for moved_tensor in moved), default=0.0)
    if difference == 0.0:
        return Disagreement(what, 0.0, 0.0)
    return Disagreement(
        what, difference / norm if norm else float("inf"), difference / limit if limit else float("inf")
    )


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())
