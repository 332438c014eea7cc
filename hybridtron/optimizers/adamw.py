"""AdamW (Loshchilov and Hutter, 2019) as an update rule.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    direction = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

g is the gradient, m and v are its moments, b1 and b2 are the betas, and t is the number of the step. The caller applies
the learning rate and the weight decay. Runs with `optim.name=adamw` do not use this code but Megatron's optimizer,
which has fused kernels. This code is for other update rules that use AdamW for some of the weights. A test compares
this code with Megatron's optimizer.
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

    supports_mup = True
    in_megatron = True

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        return {"exp_avg": like(weight), "exp_avg_sq": like(weight)}

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        (beta1, beta2) = settings.betas
        step = settings.step
        mean = parts["exp_avg"].lerp_(gradient, 1 - beta1)
        square = parts["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(settings.eps)
        return (mean / (1 - beta1**step)).div_(root)
