"""Emulated FP8: its values by hand, the format of each rounded tensor, and the history of delayed scaling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.table import architecture
from hybridtron.config.choices import FP8_MULTIPLES, Precision
from hybridtron.model.lm import LanguageModel, ModelSlice
from hybridtron.parallel import fp8
from hybridtron.parallel.fp8 import E4M3, E5M2, Fp8, Fp8Linear, Role, round_by, round_tiles, scale_of
from hybridtron.parallel.fp8_statistics import Delayed
from hybridtron.parallel.linear import LinearBackend, TensorGroup
from tests.conftest import small_config

ONE = torch.tensor(1.0)


def nearest(value: float, mantissa: int, lowest: int, largest: float) -> float:
    """The nearest value of a format with `mantissa` bits of mantissa, ties to the even one, as the standard has it."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(value)[1] - 1, lowest)
    step = 2.0 ** (exponent - mantissa)
    return math.copysign(min(abs(round(value / step) * step), largest), value)


def e4m3(value: float) -> float:
    return nearest(value, 3, -6, 448.0)


def e5m2(value: float) -> float:
    return nearest(value, 2, -14, 57344.0)


def projection(recipe: Precision, rows: int, columns: int, history: int = 3) -> Fp8Linear:
    """Build a projection whose weights no format holds exactly."""
    layer = Fp8Linear(columns, rows, Fp8(recipe, range(1), history))
    layer.weight.data.copy_(torch.randn(rows, columns))
    return layer


@pytest.mark.parametrize(
    ("value", "as_e4m3", "as_e5m2"),
    [
        (1.0, 1.0, 1.0),
        (1.0625, 1.0, 1.0),  # half-way to 1.125: to the even one
        (1.1875, 1.25, 1.25),  # half-way between 1.125 and 1.25: to the even one
        (-3.3, -3.25, -3.5),
        (448.0, 448.0, 448.0),
        (470.0, 448.0, 448.0),
        (1e6, 448.0, 57344.0),  # beyond the range: its end
        (-math.inf, -448.0, -57344.0),
        (0.0, 0.0, 0.0),
        (2**-9, 2**-9, 2**-9),  # the least of e4m3, a subnormal
        (3 * 2**-10, 2 * 2**-9, 3 * 2**-10),
        (2**-10, 0.0, 2**-10),
        (2**-16, 0.0, 2**-16),  # the least of e5m2
        (2**-17, 0.0, 0.0),
    ],
)
def test_rounded_values_equal_hand_computed_values(value: float, as_e4m3: float, as_e5m2: float) -> None:
    for dtype, expected in ((E4M3, as_e4m3), (E5M2, as_e5m2)):
        assert round_by(torch.tensor([value]), ONE, dtype).floats().tolist() == [expected]


def test_rounding_equals_that_of_the_standard() -> None:
    values = torch.randn(2000) * torch.logspace(-6, 4, 2000)
    assert round_by(values, ONE, E4M3).floats().tolist() == [e4m3(v) for v in values.tolist()]
    assert round_by(values, ONE, E5M2).floats().tolist() == [e5m2(v) for v in values.tolist()]


def test_rounding_keeps_nan() -> None:
    for dtype in (E4M3, E5M2):
        assert round_by(torch.tensor([math.nan]), ONE, dtype).floats().isnan().all()
    assert round_tiles(torch.full((128, 128), math.nan), (128, 128), E4M3).floats().isnan().all()


def test_scales_equal_hand_computed_values() -> None:
    greatest = torch.tensor([448.0, 2.0, 0.0, math.inf, 1e-44])
    assert scale_of(greatest, 448.0).tolist() == [1.0, 224.0, 1.0, 1.0, torch.finfo(torch.float32).max]
    assert scale_of(torch.tensor(math.nan), 448.0).isnan()


def test_scales_of_tiles_equal_hand_computed_values() -> None:
    """Each tile is scaled for itself, by a power of two that leaves it within the range."""
    matrix = torch.ones(2, 256)
    matrix[0, 128:] = 3.5
    matrix[1, :128] = 0.0
    matrix[1, 128:] = 2.0**-20
    runs = round_tiles(matrix, (1, 128), E4M3)
    # 448 / 1 -> 256;  448 / 3.5 = 128;  zeros -> 1;  448 / 2^-20 -> 2^28
    assert runs.inverse.tolist() == [[1 / 256, 1 / 128], [1.0, 2.0**-28]]
    assert torch.equal(runs.floats(), matrix)
    assert runs.values.float()[:, [0, -1]].tolist() == [[256.0, 448.0], [0.0, 256.0]]
    along_rows = round_tiles(matrix.T.contiguous(), (128, 1), E4M3)
    assert torch.equal(along_rows.floats(), matrix.T)
    square = torch.full((128, 256), 1.0)
    square[5, 3] = 400.0
    assert round_tiles(square, (128, 128), E4M3).inverse.tolist() == [[1.0, 1 / 256]]


@pytest.mark.parametrize("shape", [(128, 130), (100, 128)])
def test_ragged_tiles_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="128 x 128"):
        round_tiles(torch.ones(shape), (128, 128), E4M3)


PER_TENSOR = [("x", E4M3), ("weight", E4M3), ("dy", E5M2)]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Precision.fp8_delayed, PER_TENSOR),
        (Precision.fp8_current, PER_TENSOR),
        # x and dy along each of the axes that their products sum over
        (Precision.fp8_block, [("x", E4M3), ("weight", E4M3), ("x", E4M3), ("dy", E4M3), ("dy", E4M3)]),
    ],
)
def test_forward_dgrad_and_wgrad_cast_every_factor_once(
    recipe: Precision, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cast x and W to e4m3 and dy to e5m2, once each; only rounded tensors are multiplied."""
    casts = []
    factors = []
    rounding = fp8.Rounding.__call__
    product = torch.Tensor.__matmul__

    def counted(self: fp8.Rounding, matrix: Tensor, role: Role, summed_axis: int = 1) -> fp8.Rounded:
        rounded = rounding(self, matrix, role, summed_axis)
        casts.append((role.name, rounded.values.dtype))
        return rounded

    def multiplied(left: Tensor, right: Tensor) -> Tensor:
        factors.append((tuple(left.shape), tuple(right.shape)))
        return product(left, right)

    monkeypatch.setattr(fp8.Rounding, "__call__", counted)
    monkeypatch.setattr(torch.Tensor, "__matmul__", multiplied)
    x = torch.randn(64, 2, 384, dtype=torch.bfloat16, requires_grad=True)
    layer = projection(recipe, 256, 384)
    layer.weight.data = layer.weight.data.bfloat16()
    y = layer(x)
    assert (y.dtype, y.shape) == (torch.bfloat16, (64, 2, 256))
    assert casts == [cast for cast in expected if cast[0] != "dy"]
    y.sum().backward()
    assert casts == expected
    forward = ((128, 384), (384, 256))
    dgrad = ((128, 256), (256, 384))
    wgrad = ((256, 128), (128, 384))
    assert factors == [forward, dgrad, wgrad]
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.dtype == layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (3.0, 70.0, 1000.0)])
def test_products_multiply_rounded_values(scales: tuple[float, float, float]) -> None:
    """y = q(x) q(W)^T, dx = q(dy) q(W), dW = q(dy)^T q(x), with rounding by hand."""
    x = torch.randn(16, 32, requires_grad=True)
    dy = torch.randn(16, 48)
    layer = projection(Precision.fp8_delayed, 48, 32)
    layer.slots.scale_3.copy_(torch.tensor(scales))
    y = layer(x)
    y.backward(dy)

    def rounded(tensor: Tensor, scale: float, nearest_one: Any) -> Tensor:
        return torch.tensor([nearest_one(v) for v in (tensor.detach() * scale).flatten().tolist()]).view_as(tensor) / (
            scale
        )

    qx, qw, qdy = (
        rounded(tensor, scale, rule)
        for tensor, scale, rule in zip((x, layer.weight, dy), scales, (e4m3, e4m3, e5m2), strict=True)
    )
    torch.testing.assert_close(y, qx @ qw.T)
    torch.testing.assert_close(x.grad, qdy @ qw)
    torch.testing.assert_close(layer.weight.grad, qdy.T @ qx)
    assert not torch.allclose(y, x @ layer.weight.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", list(FP8_MULTIPLES))
def test_fp8_products_are_near_the_exact_ones(recipe: Precision) -> None:
    """Whatever the sizes of the values, since scales fill the range: a few percent of the norm."""
    for size in (1e-6, 1.0, 1e6):
        x = torch.randn(128, 128).mul(size).requires_grad_()
        dy = torch.randn(128, 256) / size
        linear = projection(recipe, 256, 128)
        statistics = Delayed({"w": linear}, linear.fp8, torch.device("cpu"))
        if recipe == Precision.fp8_delayed:
            linear(x).backward(dy)
            statistics.settle(True)
            x.grad = linear.weight.grad = None
        y = linear(x)
        y.backward(dy)
        for actual, exact in ((y, x @ linear.weight.T), (x.grad, dy @ linear.weight), (linear.weight.grad, dy.T @ x)):
            assert actual is not None
            assert ((actual - exact).norm() / exact.norm()).item() < 0.08


@pytest.mark.parametrize("recipe", FP8_MULTIPLES)
def test_frozen_weight_has_no_gradient_and_keeps_no_input(recipe: Precision) -> None:
    linear = projection(recipe, 128, 128)
    x = torch.randn(128, 128, requires_grad=True)
    dy = torch.randn(128, 128)
    linear(x).backward(dy)
    expected = x.grad
    x.grad = None
    linear.weight.requires_grad_(False)
    saved = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = linear(x)
    assert len(saved) == 2, "only the weight and its scale"
    y.backward(dy)
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def step_of(layer: Fp8Linear, x: float, dy: float) -> None:
    """A forward and backward pass in which these are the greatest values."""
    layer(torch.full((16, 16), x).requires_grad_()).backward(torch.full((16, 16), dy))


def test_scales_of_delayed_scaling_follow_the_last_steps() -> None:
    """A step's scale comes from the last three steps' largest values; a step's own values count from the next one."""
    layer = projection(Precision.fp8_delayed, 16, 16)
    layer.weight.data.fill_(-0.5)
    statistics = Delayed({"w": layer}, layer.fp8, torch.device("cpu"))
    history, scale = (part.data for part in statistics.parts())
    assert (history.shape, scale.tolist()) == ((3, 3), [1.0, 1.0, 1.0])
    expected = [
        (8.0, 2.0, [448 / 8, 448 / 0.5, 57344 / 2]),
        (-4.0, 4.0, [448 / 8, 896, 57344 / 4]),
        (2.0, 0.0, [448 / 8, 896, 57344 / 4]),
        (2.0, 0.0, [448 / 4, 896, 57344 / 4]),
        (0.0, 0.0, [448 / 2, 896, 1.0]),
        (0.0, math.inf, [448 / 2, 896, 1.0]),
    ]
    for x, dy, scales in expected:
        before = scale.clone()
        step_of(layer, x, dy)
        assert torch.equal(scale, before), "it is fixed within a step"
        assert history[:, 0].tolist() == [abs(x), 0.5, dy]
        statistics.settle(True)
        assert history[:, 0].tolist() == [0, 0, 0]
        assert history[:, -1].tolist() == [abs(x), 0.5, dy]
        if dy == 0.0 and x == 0.0:
            assert scale.tolist() == [*scales[:2], 57344 / 4], "three steps of zeros keep the scale that there was"
        else:
            assert scale[:2].tolist() == scales[:2]


def test_greatest_values_only_rise_within_a_step() -> None:
    """A pass that runs again, and a smaller one, change nothing."""
    layer = projection(Precision.fp8_delayed, 16, 16)
    statistics = Delayed({"w": layer}, layer.fp8, torch.device("cpu"))
    history, scale = (part.data for part in statistics.parts())
    step_of(layer, 3.0, 5.0)
    seen = history.clone()
    for x, dy in ((3.0, 5.0), (1.0, 2.0), (-3.0, -5.0)):
        step_of(layer, x, dy)
        assert torch.equal(history, seen)
    step_of(layer, 4.0, 5.0)
    assert history[0, 0] == 4.0
    assert scale.tolist() == [1.0, 1.0, 1.0]


def test_refused_steps_and_evaluations_change_no_statistics() -> None:
    layer = projection(Precision.fp8_delayed, 16, 16)
    statistics = Delayed({"w": layer}, layer.fp8, torch.device("cpu"))
    step_of(layer, 3.0, 5.0)
    statistics.settle(True)
    before = [part.data.clone() for part in statistics.parts()]
    with torch.no_grad():
        layer(torch.full((16, 16), 100.0))
    assert all(map(torch.equal, before, (part.data for part in statistics.parts())))
    for x in (100.0, math.inf, math.nan):
        step_of(layer, x, math.nan)
        statistics.settle(False)
        assert all(map(torch.equal, before, (part.data for part in statistics.parts())))


@pytest.mark.parametrize("recipe", list(FP8_MULTIPLES))
def test_inference_accepts_any_number_of_tokens(recipe: Precision) -> None:
    """Text is generated token by token; in fp8_block each row has scales of its own."""
    layer = projection(recipe, 128, 256)
    x = torch.randn(128, 256)
    with torch.no_grad():
        some = layer(x[:3])
        assert some.shape == (3, 128)
        if recipe == Precision.fp8_block:
            torch.testing.assert_close(some, layer(x)[:3])
            with torch.enable_grad(), pytest.raises(ValueError, match="128 x 1"):
                layer(x[:3])


NEVER = ("x_proj", "dt_proj", "conv", "head", "sparse")


@pytest.mark.parametrize("pattern", ["M-W-F", "S-SM", "-HhH-"])
def test_projections_marked_in_the_table_alone_multiply_in_fp8(pattern: str) -> None:
    """Norms, convolutions, scans, small projections, embedding and head do not; nor do layers kept in bf16.

    Nor does anything of sparse attention, whose bins and scores would move with the rounding.
    """
    config = small_config(pattern, tie_embeddings=False)
    branches = {
        letter: {**config.layers[like], "sparse": {"keys": 6, "projected": True}} for letter, like in ("HM", "hS")
    }
    config = replace(config, layers={**config.layers, **branches})
    backend = LinearBackend(fp8=Fp8(Precision.fp8_current, range(1, len(pattern) - 1)))
    model = LanguageModel(architecture(config), ModelSlice(tensor=TensorGroup(backend=backend)))
    in_fp8 = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    kept = ("layers.0.", f"layers.{len(pattern) - 1}.")
    marked = {name for name, parameter in architecture(config).table.items() if parameter.fp8}
    assert in_fp8 == {name for name in marked if not name.startswith(kept)}
    assert not [name for name in marked if any(word in name for word in NEVER)]
    assert {name: tuple(w.shape) for name, w in model.named_parameters()} == {
        name: parameter.shape for name, parameter in architecture(config).table.items()
    }
