"""The interface of an optimizer: the state it keeps for each weight, and the direction in which it moves the weight.

State parts are declared like weights (shape, cuts over ranks), so that checkpoints store them under any layout and the
planner counts them before anything is built. Update rules call only the methods of tensors: this folder does not import
torch, and does not handle process groups. `engine/update_rules.py` runs the rules inside Megatron's optimizers.

A part with the shape of its weight is cut like the weight over tensor-parallel ranks, and by the distributed optimizer
over data-parallel ranks. A part of another shape is cut over tensor-parallel ranks as it declares, and every
data-parallel rank holds a copy. All parts start at zero. Rules compute with them in fp32; they are stored in the dtype
of `precision.moments`.
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
    """Settings of one update: `optim.betas`, `optim.eps`, and the step's number, counted from 1."""

    betas: tuple[float, float]
    eps: float
    step: int


class UpdateRule(ABC):
    """Base class of optimizers.

    A rule returns a direction. Its caller applies the learning rate and the decoupled weight decay:

    weight <- (1 - lr weight_decay) weight - lr direction
    """

    in_megatron: ClassVar[bool] = False  # True if Megatron's own optimizer takes the step instead of `direction`

    @abstractmethod
    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        """Declare the state parts of a weight, by the names under which checkpoints store them."""

    def needs_whole(self, name: str, weight: Parameter) -> bool:
        """Return True if the direction of an entry depends on other entries of the weight.

        If True, every rank's `direction` gets the full gradient and full parts, which are gathered at each step. If
        False, it gets only the entries of this rank's shard, flattened.
        """
        return False

    @abstractmethod
    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        """Return the direction of the update. Updates the parts in place and leaves the gradient unchanged."""


def like(weight: Parameter) -> Parameter:
    """Declare a state part with a value for each entry of its weight."""
    return replace(weight, init=Constant(0.0), fp32=True, fp8=False)


def per_row(weight: Parameter) -> Parameter:
    """Declare a state part with a value for each row of a matrix.

    Cuts along the rows apply to the part too. Ranks that cut the columns hold the full part.
    """
    return replace(like(weight), shape=weight.shape[:1], cuts=tuple(cut for cut in weight.cuts if cut.axis == 0))
