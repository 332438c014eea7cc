"""Differences between the audit's serial and parallel step: the allowed and the actual differences.

The two steps round differently, because sums over ranks are computed in another order. The size of the rounding errors
depends on the model. For example, a head's output is nearly 0 if a query is nearly orthogonal to the only key that it
sees. A norm after the head then enlarges the output together with its rounding error.

Therefore, if a difference in fp32 exceeds its limit, the serial step is repeated from moved weights: weights that are
changed by about their last bit. The limit for each number and tensor is then raised by a multiple of the change that
the moved weights cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.parallel.mesh import Mesh, single_rank
from hybridtron.parallel.sharding import cut


@dataclass(frozen=True)
class AuditPrecision:
    """A dtype in which both steps compute, with settings for the steps and limits on their difference.

    name                   the precision's name
    dtype                  dtype for weights and computation
    distributed_optimizer  whether the parallel step uses the distributed optimizer
    noisy_start            whether noise is added to the initial weights
    clip                   whether the gradient norm is clipped

    The limit on a difference's norm is the sum of three terms:

    relative * the expected tensor's norm
    absolute * the largest norm among all gradients (for a gradient) or among all weights (for a weight)
    rounding * the norm of the tensor's change when the step starts from moved weights
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
"""Number of serial steps from moved weights.

Of a tensor's changes in these steps, the largest counts, because changes may cancel in a single step.
"""


NORM_RELATIVE = 1e-6
"""Relative limit for the gradient norm, which megatron-core sums in fp32 for gradients of any dtype."""


@dataclass(frozen=True)
class Step:
    """Results from one training step.

    loss        loss before the weights are updated
    grad_norm   norm over all gradients before clipping
    loss_after  loss after the weights are updated
    gradients   full gradients before clipping
    weights     weights after the update; a rank in the parallel step has only its tensor shards
    auxiliary   mean auxiliary losses by name
    loads       number of choices that fell on each expert, by the sub-layer's index
    dropped     number of choices that were dropped, by the sub-layer's index
    meshes      mesh for each family of weights, by which full weights are cut into this rank's shards
    """

    loss: float
    grad_norm: float
    loss_after: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    auxiliary: Mapping[str, float]
    loads: Mapping[int, Tensor]
    dropped: Mapping[int, Tensor]
    meshes: Mapping[str, Mesh] = field(default_factory=single_rank)


@dataclass(frozen=True)
class Disagreement:
    """Difference between the parallel step and the serial step, for one number or tensor.

    what      name of the number or tensor
    relative  the difference's norm, divided by the norm of the serial step's tensor
    of_limit  the difference's norm, divided by its limit
    """

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
    truth: Step,
    ranks: list[Step],
    table: Mapping[str, Parameter],
    precision: AuditPrecision,
    moved: Sequence[Step] = (),
) -> Iterator[Disagreement]:
    """Yield the differences between the serial step `truth` and the parallel step on its ranks.

    Losses and full gradients are compared on the first rank, loads and weight shards on every rank. `moved`
    are serial steps from moved weights.
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
    largest = _largest_norm(truth.weights)
    for rank, step in enumerate(ranks):
        assert truth.loads.keys() == step.loads.keys()
        for index, value in step.loads.items():
            changed = [serial.loads[index] for serial in moved]
            yield _difference(f"loads {index} on rank {rank}", value, truth.loads[index], 0.0, precision, changed)
        for index, value in step.dropped.items():
            changed = [serial.dropped[index] for serial in moved]
            yield _difference(f"dropped {index} on rank {rank}", value, truth.dropped[index], 0.0, precision, changed)
        for name, value in step.weights.items():
            mesh = step.meshes[table[name].family]
            expected, *changed = (cut(serial.weights[name], table[name], mesh) for serial in (truth, *moved))
            yield _difference(f"weight {name} on rank {rank}", value, expected, largest, precision, changed)


def _largest_norm(tensors: Mapping[str, Tensor]) -> float:
    return max(float(tensor.norm()) for tensor in tensors.values())


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _difference(
    what: str, computed: Tensor, expected: Tensor, largest: float, precision: AuditPrecision, moved: Sequence[Tensor]
) -> Disagreement:
    """Return the difference between a tensor and the expected tensor, compared with the precision's limit.

    `largest` is the largest norm among all gradients if the tensor is a gradient, and among all weights if it is a
    weight. `moved` has the tensor's value in each serial step from moved weights.
    """
    difference = _distance(computed, expected)
    norm = float(expected.double().norm())
    limit = precision.relative * norm + precision.absolute * largest
    limit += precision.rounding * max((_distance(moved_tensor, expected) for moved_tensor in moved), default=0.0)
    if difference == 0.0:
        return Disagreement(what, 0.0, 0.0)
    return Disagreement(
        what, difference / norm if norm else float("inf"), difference / limit if limit else float("inf")
    )


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())
