"""Muon (Jordan et al., 2024): orthogonalized momentum for the projections in mixers, and AdamW for all other weights.

Let W be a matrix with m rows and n columns. Let G be its gradient, and let M be its momentum:

    M <- mu M + (1 - mu) G
    U = mu M + (1 - mu) G, or M without Nesterov's look-ahead
    direction = scale(m, n) * orthogonalized(U)

Let U = P S Q^T be the singular value decomposition of U. The function `orthogonalized` approximates P Q^T. It divides U
by U's Frobenius norm, and then applies an odd polynomial a few times: X <- a X + (b X X^T + c (X X^T)^2) X. This
iteration is named after Newton and Schulz. The coefficients a, b, c are equal in every step (Jordan et al.), or
different in each step (Polar Express, Amsel et al., 2025).

Muon updates the weights that the parameter table marks as projections in mixers. A projection that is fused from
several matrices, such as keys and values, is cut into these matrices, and each is orthogonalized separately. Matrices
of experts are orthogonalized separately too. With the option `heads`, a projection to heads is also cut into the rows
of each head. AdamW updates all other weights: embedding, head, routers, norms, biases, convolutions, decays such as
A_log, and adapters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

from hybridtron.architecture.base import Parameter
from hybridtron.limits import above, at_least, below_one
from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import MatrixStage, UpdateRule, UpdateSettings, like

if TYPE_CHECKING:
    from torch import Tensor

Polynomial = tuple[float, float, float]
"""Coefficients of x, x^3 and x^5."""

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""Polynomial of Jordan et al.: after five steps, singular values from 0.002 to 1 lie between 0.68 and 1.21."""

POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28724, -23.59610, 17.30057),
    (4.10707, -2.94788, 0.544849),
    (3.94870, -2.90893, 0.551825),
    (3.31841, -2.48848, 0.510048),
    (2.30065, -1.66890, 0.418807),
    (1.89130, -1.26800, 0.376804),
)
"""Polynomials of the first steps of Polar Express.

Each polynomial minimizes the largest error on the interval into which the earlier polynomials map [0.001, 1]. The
interval's lower end is raised to at least 0.024 of the upper end. A test computes the coefficients.
"""
LIMIT: Polynomial = (1.875, -1.25, 0.375)
"""Polynomial of all later steps of Polar Express: the best polynomial on a tiny interval around 1."""

MARGIN = 1.01
"""Divisor of the matrix before each step in POLAR_EXPRESS, because rounding can make singular values exceed 1."""

TINY = 1e-30
"""Smallest divisor of a matrix, so that a zero matrix has a zero direction."""


class Coefficients(StrEnum):
    """Coefficients in Muon's iteration.

    - quintic: those of Jordan et al., the same in every step; most singular values end between 0.68 and 1.21
    - polar_express: those of Polar Express, a polynomial for each step; singular values end closer to 1
    """

    quintic = "quintic"
    polar_express = "polar_express"


class Scale(StrEnum):
    """Scale of Muon's direction for a matrix with m rows (outputs) and n columns (inputs).

    - match_rms_adamw: 0.2 sqrt(max(m, n)); entries have about the root mean square of AdamW's direction, 0.2
    - spectral: sqrt(max(1, m / n)); learning rates are about 0.02, so lr_factor must be far above 1
    """

    match_rms_adamw = "match_rms_adamw"
    spectral = "spectral"


class IterationFormat(StrEnum):
    """Number format of Muon's iteration: bf16, or the format of the master weights."""

    bf16 = "bf16"
    master = "master"


@dataclass
class MuonOptions:
    """Options of Muon. The section `optim` has betas and eps for the weights that AdamW updates."""

    # for name=muon: decay of the matrices' momentum
    momentum: Annotated[float, below_one("such as 0.95")] = 0.95
    nesterov: bool = True  # for name=muon: add the gradient to the momentum again before the iteration
    steps: Annotated[int, at_least(1)] = 5  # for name=muon: steps of the iteration
    coefficients: Coefficients = Coefficients.quintic  # for name=muon: coefficients in the iteration
    # for name=muon: scale of the direction by the matrix's shape, m rows and n columns; match_rms_adamw: 0.2
    # sqrt(max(m, n)); spectral: sqrt(max(1, m / n))
    scale: Scale = Scale.match_rms_adamw
    # for name=muon: the matrices' learning rate, as a multiple of the phase's learning rate
    lr_factor: Annotated[float, above(0)] = 1.0
    iteration: IterationFormat = IterationFormat.bf16  # for name=muon: number format of the iteration
    heads: bool = False  # for name=muon: orthogonalize each head of a projection to heads separately
    # for name=muon: each tensor-parallel rank orthogonalizes its own cut of a matrix, so the direction depends on
    # parallel.tensor; false: one rank orthogonalizes the full matrix
    blocked: bool = False


class Muon(UpdateRule):
    """Muon for the projections in mixers, and AdamW for all other weights."""

    reads: ClassVar[frozenset[str]] = frozenset({"betas", "eps", "muon"})
    decays: ClassVar[tuple[str, ...]] = ("betas", "muon.momentum")

    def __init__(self, options: MuonOptions | None = None) -> None:
        self.options = options or MuonOptions()
        self.matrix_stage = Orthogonalization(self.options)
        self.adamw = AdamW()

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        if weight.is_matrix:
            return {"exp_avg": like(weight)}
        return self.adamw.parts(name, weight)

    def lr_factor(self, name: str, weight: Parameter) -> float:
        if weight.is_matrix:
            return self.options.lr_factor
        return 1.0

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        if not weight.is_matrix:
            return self.adamw.direction(name, weight, gradient, parts, settings)
        momentum = parts["exp_avg"].lerp_(gradient, 1 - self.options.momentum)
        if self.options.nesterov:
            return gradient.lerp(momentum, self.options.momentum)
        return momentum

    def has_matrix_stage(self, name: str, weight: Parameter) -> bool:
        return weight.is_matrix


class Orthogonalization(MatrixStage):
    """Second stage of Muon: orthogonalizes a matrix of momentum, and scales it by the matrix's shape."""

    def __init__(self, options: MuonOptions) -> None:
        self.options = options
        self.by_head = options.heads
        self.by_shard = options.blocked
        self.polynomials = polynomials(options.coefficients, options.steps)

    def narrow(self, update: Tensor) -> Tensor:
        if self.options.iteration is IterationFormat.bf16:
            return update.bfloat16()
        return update

    def direction(self, matrix: Tensor) -> Tensor:
        return orthogonalized(matrix, self.polynomials)

    def scale(self, rows: int, columns: int) -> float:
        if self.options.scale is Scale.match_rms_adamw:
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def polynomials(coefficients: Coefficients, steps: int) -> list[Polynomial]:
    """Return the polynomial for each step of the iteration."""
    if coefficients is Coefficients.quintic:
        return [QUINTIC] * steps
    first = [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in POLAR_EXPRESS[:steps]]
    return first + [LIMIT] * (steps - len(first))


def orthogonalized(matrix: Tensor, steps: list[Polynomial]) -> Tensor:
    """Return an approximation to P Q^T, for the matrix P S Q^T, in the matrix's dtype.

    The smaller of X X^T and X^T X is computed, so a matrix with more rows than columns is transposed. A tensor with
    three axes is a batch of matrices.
    """
    # the sum of squares underflows or overflows unless the largest entry is about 1
    x = matrix / matrix.abs().amax((-2, -1), keepdim=True).clamp(min=TINY)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    if is_tall:
        x = x.mT
    for a, b, c in steps:
        square = x @ x.mT
        if x.dim() == 2:
            x = x.addmm(square.addmm(square, square, beta=b, alpha=c), x, beta=a)
        else:
            x = x.baddbmm(square.baddbmm(square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
