"""The Triton kernels of GLA's log decays against the reference in float64, and as compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.gla import GLAGateInputs, gla_gates
from tests.ops.compiling import assert_gates_fit, compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")
FP32 = 1e-6  # of a tensor's norm


def results(form: str, a: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Return g, and the gradients of both tensors."""
    leaves = [a.detach().requires_grad_(), bias.detach().requires_grad_()]
    with force(gla_gates=form):
        g = gla_gates(GLAGateInputs(*leaves, 16.0))
    return [g.detach(), *torch.autograd.grad(g, leaves, grad)]


def assert_right(a: Tensor, bias: Tensor, tolerances: tuple[float, float, float]) -> list[Tensor]:
    grad = torch.randn(a.shape)
    expected = results("reference", a.double(), bias.double(), grad.double())
    device = compute_device()
    actual = results("triton", a.to(device), bias.to(device), grad.to(device))
    for ours, theirs, dtype, tolerance in zip(
        actual, expected, (torch.float32, a.dtype, bias.dtype), tolerances, strict=True
    ):
        assert ours.dtype == dtype
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()
    return actual


@pytest.mark.parametrize(("rows", "length", "channels"), [(1, 1, 1), (3, 7, 5), (2, 5, 18)])
def test_kernels_equal_the_reference(rows: int, length: int, channels: int) -> None:
    a = 4 * torch.randn(length, rows, channels).transpose(0, 1)
    _, of_a, _ = assert_right(a, torch.randn(channels), (FP32, FP32, FP32))
    assert of_a.transpose(0, 1).is_contiguous()


def test_programs_add_up_the_gradients_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.gla import kernels_gates  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels_gates, "TILE", 16)
    monkeypatch.setattr(kernels_gates, "programs_at_once", lambda warps, resident: 2)
    assert_right(torch.randn(3, 11, 8), torch.randn(8), (FP32, FP32, FP32))


def test_logits_in_bf16_are_computed_in_fp32() -> None:
    """Only the logits' gradient is rounded: the interpreter truncates to bf16, by up to 2^-7 of each value."""
    assert_right((4 * torch.randn(2, 5, 6)).bfloat16(), torch.randn(6), (FP32, 2**-7, FP32))


def shipped() -> None:
    """Launch the kernels at recipes' sizes."""
    with torch.device("meta"):
        for channels in (512, 2048, 8192):
            a = torch.empty(512, 32, channels, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
            bias = torch.empty(channels, requires_grad=True)
            g = gla_gates.named("triton").function(GLAGateInputs(a, bias, 16.0))
            torch.autograd.backward(g, torch.empty_like(g))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    from hybridtron.ops.gla.kernels_gates import RESIDENT_WARPS  # not above: imported again for the interpreter

    launches, _ = compile_calls(__name__, "shipped")
    assert_gates_fit(launches, RESIDENT_WARPS)
