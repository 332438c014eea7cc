"""The interface of optimizers: the state tensors for each weight, and the direction in which a step moves the weight.

An optimizer keeps some tensors for each weight, called the weight's state parts (AdamW: two moments). State parts are
declared like weights, with a shape and with cuts. A cut says how ranks divide one axis. So checkpoints can store the
parts under any parallel layout, and the planner can count their memory before a model is built. Update rules only call
methods on tensors: this folder does not import torch, and does not handle process groups.
`engine/update_rules.py` runs the rules inside Megatron's optimizers.

A part with the weight's shape is divided over tensor-parallel ranks like the weight, and over data-parallel ranks by
the distributed optimizer. A part with another shape is divided over tensor-parallel ranks by its own cuts, and every
data-parallel rank holds a copy. All parts start at zero. Rules compute in fp32; the setting `precision.moments` is the
dtype in which parts are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.inits import Constant

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UpdateSettings:
    """Settings for one update: `optim.betas`, `optim.eps`, and the number of the step, counted from 1."""

    betas: tuple[float, float]
    eps: float
    step: int


class UpdateRule(ABC):
    """Base class for optimizers.

    A rule computes a direction. The code that calls the rule applies the learning rate and the decoupled weight decay:

        weight <- (1 - lr * weight_decay) * weight - lr * direction

    An optimizer with options of its own has a section in `optim` with the optimizer's name. The optimizer's class is
    called with the section's options.
    """

    supports_mup: ClassVar[bool] = False  # True if model.mup has learning rates for this optimizer
    in_megatron: ClassVar[bool] = False  # True if Megatron's own optimizer takes the step instead of `direction`
    matrix_stage: MatrixStage | None = None  # second stage, which needs full matrices
    # keys of `optim` that this optimizer reads, without those that every optimizer reads
    reads: ClassVar[frozenset[str]] = frozenset({"betas", "eps"})
    # keys in `optim`, such as `muon.momentum`, whose values are decays of running averages in the state
    decays: ClassVar[tuple[str, ...]] = ("betas",)

    @abstractmethod
    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        """Declare the state parts of a weight; the keys are the names under which checkpoints store them."""

    def needs_whole(self, name: str, weight: Parameter) -> bool:
        """Return True if the direction of an entry depends on the gradients of other entries.

        If True, ranks gather the gradient and the parts at each step, and call `direction` with the full tensors. If
        False, `direction` is called with this rank's shard of the gradient and of each part, flattened.
        """
        return False

    def lr_factor(self, name: str, weight: Parameter) -> float:
        """Return the weight's learning rate, as a multiple of the step's learning rate."""
        return 1.0

    @abstractmethod
    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        """Return the direction of the update. The rule updates the parts in place and must not change the gradient."""

    def has_matrix_stage(self, name: str, weight: Parameter) -> bool:
        """Return True if `direction` returns the input of `matrix_stage` for this weight, not yet the direction.

        The state is then kept for each entry separately, and `direction` is called with this rank's shard.
        """
        return False


class MatrixStage(ABC):
    """Second stage of an update rule. It computes a matrix's direction from the full matrix of first-stage results.

    A weight that is fused from several matrices is cut into these matrices. Each matrix is processed on one rank, its
    owner. Ranks send their entries to the owner, which returns the directions of these entries
    (`parallel/matrix_owners.py`).
    """

    by_shard: bool = False  # True if each tensor-parallel rank processes its shard of a matrix as a matrix of its own
    by_head: bool = False  # True if the heads of a projection are matrices of their own, processed by the same owner

    @abstractmethod
    def narrow(self, update: Tensor) -> Tensor:
        """Return results of the first stage in the number format in which they are sent and processed."""

    @abstractmethod
    def direction(self, matrix: Tensor) -> Tensor:
        """Return the direction for a full matrix, before it is scaled, in the matrix's number format.

        A tensor with three axes is a batch: the heads of a matrix, with `by_head`, or matrices of experts. The rule
        must not change the matrix, because the matrix may be part of the state.
        """

    @abstractmethod
    def scale(self, rows: int, columns: int) -> float:
        """Return the factor for the direction of a matrix, or of a head, with this shape."""


def like(weight: Parameter) -> Parameter:
    """Declare a state part in fp32 with the weight's shape and cuts."""
    return replace(weight, init=Constant(0.0), fp32=True, fp8=False)


def per_row(weight: Parameter) -> Parameter:
    """Declare a state part in fp32 with one entry for each row of the weight, a matrix.

    Ranks that divide the matrix by rows also divide the part. Ranks that divide the matrix by columns hold the full
    part.
    """
    return replace(like(weight), shape=weight.shape[:1], cuts=tuple(cut for cut in weight.cuts if cut.axis == 0))
