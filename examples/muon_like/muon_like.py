"""An optimizer with two kinds of state: orthogonalized momentum for the large matrices, AdamW for all other weights.

A matrix's momentum m <- b1 m + g is replaced by the nearest orthogonal matrix, with five steps of Newton-Schulz's
iteration (Jordan et al., Muon). Each row is then divided by a running root mean square of its entries. The state of a
matrix is its momentum, with the matrix's shape, and one value for each row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtron.architecture.base import Parameter
from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import UpdateRule, UpdateSettings, like, per_row

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: every singular value comes near 1 within five steps


class MuonLike(UpdateRule):
    def __init__(self) -> None:
        self.others = AdamW()

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        if self.needs_whole(name, weight):
            return {"momentum": like(weight), "row_squares": per_row(weight)}
        return self.others.parts(name, weight)

    def needs_whole(self, name: str, weight: Parameter) -> bool:
        return weight.fp8  # the flag of the large projections; embedding and head do not have it

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        if not self.needs_whole(name, weight):
            return self.others.direction(name, weight, gradient, parts, settings)
        first, second = settings.betas
        momentum = parts["momentum"].mul_(first).add_(gradient)
        straightened = orthogonalized(momentum)
        rows = parts["row_squares"].mul_(second).add_(straightened.square().mean(1), alpha=1 - second)
        return straightened / (rows / (1 - second**settings.step)).sqrt().add(settings.eps)[:, None]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return an approximation to U V^T, for the matrix U S V^T, by five Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=1e-12)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x
