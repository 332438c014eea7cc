"""What an optimizer is: which state it keeps of each weight, and in which direction it moves it.

The state is declared as parts like weights are (shape, cut over ranks), so that checkpoints hold it under any layout
and the planner counts it before anything is built. Update rules use tensors' own methods alone: this folder imports no
torch, and knows no process group.

A part with the shape of its weight is cut as the weight is, over tensor-parallel ranks and, by the distributed
optimizer, over data-parallel ranks. A part of another shape is cut over tensor-parallel ranks as it declares, and held
by every data-parallel rank. All parts are computed with in fp32, kept as `precision.moments`
says, and start at zero.
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
    """What an update may know besides the weight: `optim.betas`, `optim.eps`, and the number of this step, from 1."""

    betas: tuple[float, float]
    eps: float
    step: int


class UpdateRule(ABC):
    """An optimizer. The learning rate and the decoupled weight decay are applied outside of it:

    weight <- (1 - lr weight_decay) weight - lr direction
    """

    in_megatron: ClassVar[bool] = False  # Megatron's own optimizer takes the step (AdamW, fused where it can be)

    @abstractmethod
    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        """The state that is kept of a weight, by names that checkpoints use."""

    def needs_whole(self, name: str, weight: Parameter) -> bool:
        """Whether the direction is no function of each entry alone.

        Then `direction` gets the whole gradient and whole parts on every rank, gathered for each step; else the entries
        that this rank holds, flattened.
        """
        return False

    @abstractmethod
    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        """In which direction the weight moves; the parts are updated in place, the gradient stays as it is."""


def like(weight: Parameter) -> Parameter:
    """A part with a value for each entry of its weight."""
    return replace(weight, init=Constant(0.0), fp32=True, fp8=False)


def per_row(weight: Parameter) -> Parameter:
    """A part with a value for each row of a matrix: cut where the rows are, whole on every rank where columns are."""
    return replace(like(weight), shape=weight.shape[:1], cuts=tuple(cut for cut in weight.cuts if cut.axis == 0))
