"""Muon's direction against a singular value decomposition, torch.optim.Muon and Remez's algorithm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import ModelOwner, ModelSizes, Parameter, linear
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import OptimConfig
from hybridtron.config.update_rule import unread_problems, update_rule
from hybridtron.optimizers.base import UpdateSettings
from hybridtron.optimizers.muon import (
    LIMIT,
    MARGIN,
    POLAR_EXPRESS,
    Coefficients,
    IterationFormat,
    Muon,
    MuonOptions,
    Scale,
    orthogonalized,
    polynomials,
)
from tests.conftest import small_config

IN_FULL = MuonOptions(iteration=IterationFormat.master)
SETTINGS = UpdateSettings((0.9, 0.95), 1e-8, 1)


def gradients(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def directions(rule: Muon, weight: Parameter, of: list[Tensor]) -> list[Tensor]:
    parts = {"exp_avg": torch.zeros_like(of[0])}
    return [full_direction(rule, weight, gradient, parts) for gradient in of]


def full_direction(rule: Muon, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Return the direction for a weight on one rank, which has all entries."""
    update = rule.direction("layers.0.mixer.w", weight, gradient, parts, SETTINGS)
    matrices = rule.matrix_stage.narrow(update).split(weight.fused_sizes(0))
    return torch.cat(
        [rule.matrix_stage.direction(m).to(update.dtype) * rule.matrix_stage.scale(*m.shape) for m in matrices]
    )


def by_decomposition(options: MuonOptions, of: list[Tensor], sizes: tuple[int, ...]) -> list[NDArray[np.float64]]:
    """Return the directions of Muon's formulas: the polynomials are applied to singular values, in float64."""
    momentum = np.zeros(of[0].shape)
    result = []
    for gradient in (tensor.double().numpy() for tensor in of):
        momentum = options.momentum * momentum + (1 - options.momentum) * gradient
        update = options.momentum * momentum + (1 - options.momentum) * gradient if options.nesterov else momentum
        blocks = []
        for block in np.split(update, np.cumsum(sizes)[:-1]):
            left, values, right = np.linalg.svd(block, full_matrices=False)
            values = values / math.sqrt((block**2).sum())
            for a, b, c in polynomials(options.coefficients, options.steps):
                values = a * values + b * values**3 + c * values**5
            rows, columns = block.shape
            if options.scale is Scale.spectral:
                factor = math.sqrt(max(1, rows / columns))
            else:
                factor = 0.2 * math.sqrt(max(rows, columns))
            blocks.append(factor * (left * values) @ right)
        result.append(np.concatenate(blocks))
    return result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nesterov": False},
        {"coefficients": Coefficients.polar_express, "steps": 8},
        {"scale": Scale.spectral, "momentum": 0.5, "steps": 3},
    ],
)
@pytest.mark.parametrize("sizes", [(12,), (20, 3, 1)])
def test_direction_equals_the_formulas_for_each_fused_part(changes: dict, sizes: tuple[int, ...]) -> None:
    options = replace(IN_FULL, **changes)
    parts = tuple((f"part{index}", size) for index, size in enumerate(sizes))
    weight = linear(sum(sizes), 16, parts=parts if len(sizes) > 1 else ())
    of = gradients(sum(sizes), 16)
    for actual, expected in zip(
        directions(Muon(options), weight, of), by_decomposition(options, of, sizes), strict=True
    ):
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)
    narrow = directions(Muon(options), weight, [gradient.float() for gradient in of])
    np.testing.assert_allclose(narrow[-1].double().numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cut", [2, 4])
def test_a_matrix_that_is_cut_before_the_iteration_has_another_direction(cut: int) -> None:
    weight = linear(16, 16)
    of = gradients(16, 16)
    whole = directions(Muon(IN_FULL), weight, of)[-1]
    pieces = [directions(Muon(IN_FULL), linear(16 // cut, 16), [g.chunk(cut)[i] for g in of])[-1] for i in range(cut)]
    assert (torch.cat(pieces) - whole).norm() > 0.1 * whole.norm()


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("scale", list(Scale))
def test_steps_equal_those_of_torch_within_rounding_to_bf16(shape: tuple[int, int], scale: Scale) -> None:
    rule = Muon(MuonOptions(scale=scale))
    of = [gradient.float() for gradient in gradients(*shape)]
    ours = torch.zeros(shape)
    theirs = torch.nn.Parameter(torch.zeros(shape))
    adjust = "original" if scale is Scale.spectral else "match_rms_adamw"
    muon = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, adjust_lr_fn=adjust)
    for gradient, direction in zip(of, directions(rule, linear(*shape), of), strict=True):
        ours -= direction
        theirs.grad = gradient
        muon.step()
    assert (ours - theirs.data).norm() < 5e-2 * theirs.norm()


def test_a_zero_gradient_has_a_zero_direction() -> None:
    for options in (MuonOptions(), IN_FULL):
        (direction,) = directions(Muon(options), linear(8, 4), [torch.zeros(8, 4)])
        assert torch.equal(direction, torch.zeros(8, 4))


@pytest.mark.parametrize("coefficients", list(Coefficients))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-31, 1e-28, 1e-25, 1e-24, 1e25])
def test_direction_does_not_depend_on_the_size_of_the_entries(
    coefficients: Coefficients, dtype: torch.dtype, size: float
) -> None:
    (gradient,) = gradients(24, 16, count=1)
    steps = polynomials(coefficients, 5)
    expected = orthogonalized(gradient, steps)
    direction = orthogonalized((size * gradient).to(dtype), steps).double()
    assert (direction - expected).norm() < (0.05 if dtype is torch.bfloat16 else 1e-5) * expected.norm()
    assert torch.equal(orthogonalized(torch.zeros(24, 16, dtype=dtype), steps), torch.zeros(24, 16, dtype=dtype))


@pytest.mark.parametrize(
    ("coefficients", "smallest", "low", "high"),
    [(Coefficients.quintic, 0.002, 0.68, 1.21), (Coefficients.polar_express, 0.001, 0.84, 1.13)],
)
def test_singular_values_lie_within_the_stated_bounds(
    coefficients: Coefficients, smallest: float, low: float, high: float
) -> None:
    values = np.geomspace(smallest, 1, 100_000)
    for a, b, c in polynomials(coefficients, 5):
        values = a * values + b * values**3 + c * values**5
    assert low < values.min() < low + 0.01
    assert high - 0.01 < values.max() < high


def best_polynomial(low: float, high: float) -> tuple[float, float, float]:
    """Return the odd polynomial of degree 5 that deviates least from 1 on [low, high], by Remez's algorithm."""
    inner = ((3 * low + high) / 4, (low + 3 * high) / 4)
    for _ in range(50):
        points = (low, *inner, high)
        system = [[x, x**3, x**5, sign] for x, sign in zip(points, (1, -1, 1, -1), strict=True)]
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        root = math.sqrt(9 * b**2 - 20 * a * c)
        inner = (math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c)))
    return a, b, c


def test_polar_express_has_the_best_polynomials() -> None:
    low, high, cushion = 1e-3, 1.0, 0.02407
    for stored in POLAR_EXPRESS:
        best = np.array(best_polynomial(max(low, cushion * high), high))
        odd = np.array([1, 3, 5])
        if cushion * high > low:
            best *= 2 / (best @ np.power(low, odd) + best @ np.power(high, odd))
        np.testing.assert_allclose(stored, best, rtol=2e-5)
        low = float(best @ np.power(low, odd))
        high = 2 - low
    np.testing.assert_allclose(LIMIT, best_polynomial(0.99, 1.01), rtol=1e-3)


def test_singular_values_come_near_one() -> None:
    sizes = torch.logspace(0, -2, 16, dtype=torch.float64)
    left, right = (torch.linalg.qr(gradient)[0] for gradient in gradients(16, 16, count=2))
    matrix = left @ sizes.diag() @ right
    jordan = torch.linalg.svdvals(orthogonalized(matrix, polynomials(Coefficients.quintic, 5)))
    assert jordan.min() > 0.5
    assert jordan.max() < 1.25
    polar = torch.linalg.svdvals(orthogonalized(matrix, polynomials(Coefficients.polar_express, 8)))
    torch.testing.assert_close(polar, torch.ones_like(polar), rtol=0, atol=1e-3)
    assert polynomials(Coefficients.polar_express, 7)[-1] == LIMIT
    assert polynomials(Coefficients.polar_express, 1) == [
        tuple(k / MARGIN**p for k, p in zip(POLAR_EXPRESS[0], (1, 3, 5), strict=True))
    ]


def test_matrices_are_the_projections_of_mixers() -> None:
    table = architecture(small_config("M-WS", tie_embeddings=False)).table
    matrices = {name for name, weight in table.items() if weight.is_mixer_projection}
    assert matrices == {
        *(f"layers.0.mixer.{name}.weight" for name in ("in_proj", "x_proj", "dt_proj", "out_proj")),
        *(f"layers.1.mixer.{name}.weight" for name in ("gate_up", "down")),
        *(f"layers.2.mixer.{name}.weight" for name in ("q", "kv", "out")),
        *(f"layers.3.mixer.{name}.weight" for name in ("in_proj", "bc_proj", "out_proj")),
    }
    rule = Muon()
    for name, weight in table.items():
        assert set(rule.parts(name, weight)) == ({"exp_avg"} if name in matrices else {"exp_avg", "exp_avg_sq"})
    head = table["head.weight"]
    assert head.projection
    assert head.owner == ModelOwner("head")


@pytest.mark.parametrize(
    ("kind", "matrices", "others"),
    [
        ("rwkv6", {"mix_down.weight", "decay_down.weight", "decay_up.weight"}, {"mix_up", "mix"}),
        ("kda", {"decay_down.weight", "decay_up.weight", "gate_down.weight", "gate_up.weight"}, {"conv_weight"}),
        ("gla", {"gate_down.weight", "gate_up.weight"}, set()),
    ],
)
def test_low_rank_projections_of_a_mixer_are_matrices(kind: str, matrices: set[str], others: set[str]) -> None:
    weights = SPECS[kind]().parameters(ModelSizes(256, 4))
    assert all(weights[name].projection for name in matrices)
    assert not any(weights[name].projection for name in others)


def heads_of(kind: str, **options: object) -> dict[str, tuple[int, ...]]:
    weights = SPECS[kind](**options).parameters(ModelSizes(256, 4))
    return {name: weight.heads for name, weight in weights.items() if weight.heads}


def test_projections_to_heads_have_a_mark() -> None:
    attention = {"q.weight": (8,), "kv.weight": (2, 2), "gate.weight": (8,)}
    assert heads_of("attention", heads=8, kv_heads=2, gate=True) == attention
    shared = {"q.weight": (8,), "kv.weight": (8, 8)}
    assert heads_of("shared_attention", heads=8, hidden=64, rank=4, adapt_attention=True) == shared
    assert heads_of("gated_deltanet", heads=8, key_heads=4, expand_k=0.5) == {"in_proj.weight": (4, 4, 8, 8)}
    assert heads_of("kda", heads=4) == {"in_proj.weight": (4, 4, 4)}
    mamba2 = {"in_proj.weight": (8, 8, 1), "bc_proj.weight": (2, 2)}
    assert heads_of("mamba2", head_dim=64, groups=2) == mamba2
    assert heads_of("mamba3", head_dim=64)["in_proj.weight"] == (8, 8, 1, 1, 1)
    assert heads_of("rwkv6") == {f"{name}_proj.weight": (4,) for name in "rkvg"}
    assert not heads_of("mamba") | heads_of("swiglu", hidden=64) | heads_of("rwkv6_channel_mix")


def test_a_batch_has_the_directions_of_its_matrices() -> None:
    steps = polynomials(Coefficients.quintic, 5)
    for shape in ((4, 6, 16), (4, 16, 6)):
        (batch,) = gradients(*shape, count=1)
        batch[0] *= 1e-20
        for actual, matrix in zip(orthogonalized(batch, steps), batch, strict=True):
            torch.testing.assert_close(actual, orthogonalized(matrix, steps))


def test_lr_factor_applies_to_matrices_only() -> None:
    rule = cast(Muon, update_rule(OptimConfig(name="muon", muon=MuonOptions(lr_factor=40.0))))
    table = architecture(small_config("M-")).table
    assert {rule.lr_factor(name, weight) for name, weight in table.items() if weight.is_mixer_projection} == {40.0}
    assert {rule.lr_factor(name, weight) for name, weight in table.items() if not weight.is_mixer_projection} == {1.0}


def test_options_of_another_optimizer_are_refused() -> None:
    changed = MuonOptions(steps=3, scale=Scale.spectral)
    problems = {problem.key: problem for problem in unread_problems(OptimConfig(muon=changed))}
    assert set(problems) == {"optim.muon.steps", "optim.muon.scale"}
    assert "optim.name=adamw does not read it" in problems["optim.muon.steps"].message
    assert "use optim.name=muon" in problems["optim.muon.steps"].message
    assert not list(unread_problems(OptimConfig(name="muon", muon=changed, betas=[0.8, 0.9])))
    assert not list(unread_problems(OptimConfig(eps=1e-6)))
