"""Angles and turns against their references, numbers worked out by hand, and their own gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.dispatch import force
from hybridtron.ops.rotations import AngleInputs, TurnInputs, angles, turn_pairs, turned

DOCUMENTS = [None, [[80], [80]], [[32, 32, 16], [1, 40, 39]]]
FAST_ANGLES = ["blocked", "native"]


def document_index(lengths: list[list[int]] | None) -> Tensor | None:
    if lengths is None:
        return None
    return torch.stack([torch.arange(7, 7 + len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def angle_inputs(length: int = 80, documents: list[list[int]] | None = None, dtype=torch.float64) -> AngleInputs:
    steps = torch.rand(2, length, 3, dtype=dtype)
    rates = math.pi * torch.randn(2, length, 4, dtype=dtype).tanh()
    return AngleInputs(steps.requires_grad_(), rates.requires_grad_(), document_index(documents))


def turn_inputs(dtype: torch.dtype = torch.float64, groups: int = 2, size: int = 10) -> TurnInputs:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k, q = torch.randn(2, 2, 9, groups, size, dtype=dtype).unbind(0)
    k_bias, q_bias = torch.randn(2, 4, size, dtype=wide).unbind(0)
    theta = 3 * torch.randn(2, 9, 4, 3, dtype=wide)
    return TurnInputs(*(tensor.detach().requires_grad_() for tensor in (k, q, k_bias, q_bias, theta)))


@pytest.mark.parametrize("form", ["reference", *FAST_ANGLES])
def test_angles_equal_hand_computed_values(form: str) -> None:
    """Half a turn in steps of 1, and a quarter in steps of 1/2; the third token begins a document."""
    rates = torch.full((1, 4, 1), math.pi)
    with force(angles=form):
        theta = angles(AngleInputs(torch.tensor([[[1.0, 0.5]] * 4]), rates, torch.tensor([[0, 0, 1, 1]])))
    assert_close(theta[0, :, :, 0].cos(), torch.tensor([[-1.0, 0.0], [1.0, -1.0], [-1.0, 0.0], [1.0, -1.0]]))


@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
@pytest.mark.parametrize("fast", FAST_ANGLES)
def test_fast_angles_equal_the_reference(fast: str, documents: list[list[int]] | None) -> None:
    inputs = angle_inputs(documents=documents)
    turns_by_form = {}
    for form in ("reference", fast):
        with force(angles=form):
            theta = angles(inputs)
        turns = torch.stack([theta.cos(), theta.sin()])
        turns_by_form[form] = (
            turns,
            *torch.autograd.grad((turns * torch.linspace(-1, 2, 80)[:, None, None]).sum(), inputs[:2]),
        )
    assert_close(turns_by_form[fast], turns_by_form["reference"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FAST_ANGLES)
def test_angles_of_a_document_have_no_bit_of_another(form: str) -> None:
    """Check in fp32, where a difference between sums over the row would round otherwise."""
    steps, rates, documents = angle_inputs(documents=DOCUMENTS[2], dtype=torch.float32)
    both = torch.where(torch.arange(80)[:, None] < 32, steps.detach() * 5, steps.detach())
    with force(angles=form):
        first, other = (angles(AngleInputs(steps.detach() * factor, rates, documents)) for factor in (1.0, 5.0))
        mixed = angles(AngleInputs(both, rates, documents))
    assert torch.equal(mixed[0, 32:], first[0, 32:])
    assert torch.equal(mixed[0, :32], other[0, :32])


@pytest.mark.parametrize("form", FAST_ANGLES)
def test_long_rows_keep_their_angles(form: str) -> None:
    """50,000 tokens that turn about 70,000 rad: a sum in fp32 would be off by 0.004 in its last bit alone."""
    inputs = angle_inputs(50_000, dtype=torch.float32)
    inputs = inputs._replace(rates_BLS=inputs.rates_BLS.abs())
    exact = torch.cumsum(inputs.steps_BLH.double()[..., None] * inputs.rates_BLS.double().unsqueeze(2), dim=1)
    with force(angles=form):
        error = angles(inputs) - exact
    assert (2 * (error / 2).sin()).abs().max() < 3e-4


def test_turn_by_a_quarter_equals_hand_computed_values() -> None:
    """(1, 0) by a quarter turn is (0, 1); the last entries stay."""
    x = torch.tensor([1.0, 0.0, 0.0, 2.0, 5.0])
    quarter = torch.tensor([math.pi / 2, math.pi])
    assert_close(turned(x, quarter), torch.tensor([0.0, 1.0, 0.0, -2.0, 5.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["reference", "native"])
def test_gradients_of_turns_are_the_slopes(form: str) -> None:
    with force(turn_pairs=form):
        assert torch.autograd.gradcheck(
            lambda *fields: turn_pairs(TurnInputs(*fields)), [*turn_inputs()], fast_mode=True
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("inputs", ["as made", "odd channels", "tokens first", "channels first"])
def test_compiled_turns_equal_the_reference(dtype: torch.dtype, tolerance: float, inputs: str) -> None:
    assert_compiled_turns_equal(laid_out(inputs, dtype), tolerance)


def laid_out(how: str, dtype: torch.dtype) -> TurnInputs:
    """Inputs as made, with odd channels, or with axes in another order in memory."""
    if how == "odd channels":
        return turn_inputs(dtype, size=7)
    if how == "as made":
        return turn_inputs(dtype)
    inputs = turn_inputs(dtype, groups=1)
    order = (1, 0, 2, 3) if how == "tokens first" else (3, 2, 0, 1)
    back = [order.index(axis) for axis in range(4)]
    moved = (t.detach().permute(order).contiguous().permute(back).requires_grad_() for t in inputs[:2])
    return TurnInputs(*moved, *inputs[2:])


def assert_compiled_turns_equal(inputs: TurnInputs, tolerance: float) -> None:
    results = {}
    for form in ("reference", "native"):
        with force(turn_pairs=form):
            k, q = turn_pairs(inputs)
        weights = torch.linspace(-1, 2, k.numel(), dtype=torch.float64).view_as(k)
        results[form] = k, q, *torch.autograd.grad(((k.double() - q.double().sin()) * weights).sum(), inputs)
    for ours, exact in zip(results["native"], results["reference"], strict=True):
        assert ours.dtype == exact.dtype
        assert (ours - exact).double().norm() <= tolerance * exact.double().norm()


def test_scores_depend_on_the_turns_between_tokens_alone() -> None:
    inputs = turn_inputs()
    k, q = turn_pairs(inputs)
    more_k, more_q = turn_pairs(inputs._replace(angles_BLHS=inputs.angles_BLHS + 1.7))
    assert_close(torch.einsum("blhn,bmhn->bhlm", q, k), torch.einsum("blhn,bmhn->bhlm", more_q, more_k))
