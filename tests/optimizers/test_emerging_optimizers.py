"""Steps of Muon against NVIDIA's `emerging-optimizers`, which megatron-core's Muon uses.

The package needs Python 3.12 and is not a dependency: without it these tests are skipped.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import linear
from hybridtron.optimizers.base import UpdateSettings
from hybridtron.optimizers.muon import Coefficients, IterationFormat, Muon, MuonOptions, Scale

theirs = pytest.importorskip(
    "emerging_optimizers.orthogonalized_optimizers", reason="emerging-optimizers is not installed"
)
LR = 0.02
WEIGHT_DECAY = 0.1
STEPS = 5
SETTINGS = UpdateSettings((0.9, 0.95), 1e-8, 1)
PRECISIONS = {IterationFormat.master: "highest", IterationFormat.bf16: "medium"}
SCALES = {Scale.match_rms_adamw: ("spectral", 0.2), Scale.spectral: ("shape_scaling", 1.0)}
"""Their name and factor of each scale."""
COEFFICIENTS = {Coefficients.quintic: "simple", Coefficients.polar_express: "polar_express"}
TOLERANCES = {  # of the change of the weights; the iteration multiplies rounding errors by up to 3.4445^5 = 485
    (Coefficients.quintic, IterationFormat.master): 1e-4,
    (Coefficients.polar_express, IterationFormat.master): 1e-3,  # their coefficients have four decimals
    (Coefficients.quintic, IterationFormat.bf16): 3e-2,
    (Coefficients.polar_express, IterationFormat.bf16): 3e-2,
}


def steps_of_ours(start: Tensor, gradients: list[Tensor], options: MuonOptions) -> Tensor:
    """Return the matrix after a step for each gradient."""
    rule = Muon(options)
    matrix = start.clone()
    parts = {"exp_avg": torch.zeros_like(start)}
    for gradient in gradients:
        update = rule.direction("layers.0.mixer.w", linear(*start.shape), gradient, parts, SETTINGS)
        direction = rule.matrix_stage.direction(rule.matrix_stage.narrow(update)).float()
        matrix = (1 - LR * WEIGHT_DECAY) * matrix - LR * rule.matrix_stage.scale(*start.shape) * direction
    return matrix


def steps_of_theirs(start: Tensor, gradients: list[Tensor], options: MuonOptions) -> Tensor:
    matrix = torch.nn.Parameter(start.clone())
    scale, factor = SCALES[options.scale]
    muon = theirs.Muon(
        [matrix],
        lr=LR,
        momentum=options.momentum,
        weight_decay=WEIGHT_DECAY,
        nesterov=options.nesterov,
        fp32_matmul_prec=PRECISIONS[options.iteration],
        coefficient_type=COEFFICIENTS[options.coefficients],
        num_ns_steps=options.steps,
        scale_mode=scale,
        extra_scale_factor=factor,
    )
    for gradient in gradients:
        matrix.grad = gradient.clone()
        muon.step()
    return matrix.data


@pytest.mark.parametrize("iteration", list(IterationFormat))
@pytest.mark.parametrize("coefficients", list(Coefficients))
@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_steps_equal_those_of_emerging_optimizers(
    shape: tuple[int, int], nesterov: bool, scale: Scale, coefficients: Coefficients, iteration: IterationFormat
) -> None:
    generator = torch.Generator().manual_seed(5)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(1 + STEPS))
    options = MuonOptions(nesterov=nesterov, scale=scale, coefficients=coefficients, iteration=iteration)
    ours = steps_of_ours(start, gradients, options) - start
    expected = steps_of_theirs(start, gradients, options) - start
    assert (ours - expected).norm() < TOLERANCES[coefficients, iteration] * expected.norm()
