"""Lion (Chen et al., 2023) as an update rule: the sign of an interpolation between momentum and gradient.

    direction = sign(b1 m + (1 - b1) g)         m <- b2 m + (1 - b2) g

g is the gradient and m the momentum, the only state. b1 and b2 are `optim.betas`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hybridtron.architecture.base import Parameter
from hybridtron.optimizers.base import UpdateRule, UpdateSettings, like

if TYPE_CHECKING:
    from torch import Tensor


class Lion(UpdateRule):
    """Lion for all weights."""

    reads: ClassVar[frozenset[str]] = frozenset({"betas"})

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        return {"exp_avg": like(weight)}

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        (beta1, beta2) = settings.betas
        momentum = parts["exp_avg"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        momentum.lerp_(gradient, 1 - beta2)
        return direction
