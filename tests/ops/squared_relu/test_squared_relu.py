"""Squared ReLU: transformers' function, gradients, and the Triton kernels, also as compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from transformers.activations import ACT2FN

from hybridtron.device import compute_device
from hybridtron.ops.squared_relu import SquaredReLUInputs, squared_relu
from tests.ops.compiling import compile_calls


def test_reference_equals_transformers_and_has_the_slopes_as_gradients() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(squared_relu(SquaredReLUInputs(x)), ACT2FN["relu2"](x))
    assert gradcheck(lambda x: squared_relu(SquaredReLUInputs(x)), (x,))


def results(form: str, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = squared_relu.named(form).function(SquaredReLUInputs(x))
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5, 7), (5, 1025)], ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
def test_kernels_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype, close: float) -> None:
    """The interpreter truncates to bf16: an error of up to 2^-7 of each value."""
    x, dy = (torch.randn(shape).to(dtype).transpose(0, -1) for _ in range(2))
    expected = results("reference", x.double(), dy.double())
    actual = results("triton", x.to(compute_device()), dy.to(compute_device()))
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
        assert (ours.cpu().double() - theirs).norm() <= close * theirs.norm()


@pytest.mark.usefixtures("interpreter")
def test_kernels_keep_values_that_are_no_numbers() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf], device=compute_device())
    for values in results("triton", x, torch.ones_like(x)):
        assert values.tolist() == pytest.approx([torch.nan, torch.inf, 0.0], nan_ok=True)


def shipped() -> None:
    """Launch both kernels at the size of a 30B model's shared expert."""
    with torch.device("meta"):
        x = torch.empty(8192, 3712, dtype=torch.bfloat16, requires_grad=True)
        y = squared_relu.named("triton").function(SquaredReLUInputs(x))
        torch.autograd.backward(y, torch.empty_like(y))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, _ = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_forward", "_backward"}
    assert [fault for launch in launches for fault in launch.faults()] == []
