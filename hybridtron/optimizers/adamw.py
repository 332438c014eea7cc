"""AdamW (Loshchilov and Hutter, 2019): decoupled weight decay, two moments of the gradient.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    direction = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

Runs with `optim.name=adamw` use Megatron's optimizer, which has the fused kernels of torch, Transformer Engine or apex.
The formula here serves rules that use AdamW for some weights. Tests compare it with Megatron's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hybridtron.architecture.base import Parameter
from hybridtron.optimizers.base import UpdateRule, UpdateSettings, like

if TYPE_CHECKING:
    from torch import Tensor


class AdamW(UpdateRule):
    """AdamW with bias correction, as an update rule."""

    in_megatron = True

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        return {"exp_avg": like(weight), "exp_avg_sq": like(weight)}

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        (first, second) = settings.betas
        step = settings.step
        mean = parts["exp_avg"].lerp_(gradient, 1 - first)
        square = parts["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.sqrt().div_(math.sqrt(1 - second**step)).add_(settings.eps)
        return (mean / (1 - first**step)).div_(root)
