"""The Triton kernels of gated MLPs against the references in float64, and as compiled for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.geglu import GEGLUInputs, geglu
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")
Gate = tuple[Op[Any, Tensor], Callable[..., Any]]
GATES: dict[str, Gate] = {"swiglu": (swiglu, SwiGLUInputs), "geglu": (geglu, GEGLUInputs)}
BOTH = pytest.mark.parametrize("gate", GATES)


def results(gate: str, implementation: str, gate_up: Tensor, dy: Tensor, *numbers: float) -> list[Tensor]:
    op, inputs = GATES[gate]
    gate_up = gate_up.detach().requires_grad_()
    with force(**{gate: implementation}):
        y = op(inputs(gate_up, *numbers))
    return [y.detach(), *torch.autograd.grad(y, gate_up, dy.to(y.dtype))]


@pytest.mark.parametrize(("gate", "numbers"), [("swiglu", ()), ("swiglu", (0.7,)), ("geglu", ())], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (7, 6), (3, 5, 34), (2, 1, 2 * 1025)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.bfloat16, 2**-7)], ids=str)
def test_triton_gates_equal_the_reference_at_any_size(
    gate: str, numbers: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    """The interpreter truncates to bf16 instead of rounding: an error of up to 2^-7 of each value."""
    gate_up = (3 * torch.randn(shape)).to(dtype)
    dy = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    expected = results(gate, "reference", gate_up.double(), dy.double(), *numbers)
    actual = results(gate, "triton", gate_up.to(compute_device()), dy.to(compute_device()), *numbers)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


@BOTH
def test_triton_gates_accept_inputs_that_are_not_contiguous(gate: str) -> None:
    gate_up = torch.randn(4, 5, 12).transpose(0, 1)
    dy = torch.randn(4, 5, 6).transpose(0, 1)
    for ours, theirs in zip(results(gate, "triton", gate_up, dy), results(gate, "reference", gate_up, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


@BOTH
def test_triton_gates_are_exact_far_from_zero(gate: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 5.0]])
    actual = results(gate, "triton", gate_up, torch.ones(1, 2))
    assert actual[0].tolist() == [[0.0, 1000.0]]
    assert actual[1].tolist() == [[0.0, 5.0, 0.0, 200.0]]


def shipped() -> None:
    """Launch the kernels at the sizes of recipes."""
    with torch.device("meta"):
        for dtype in (torch.bfloat16, torch.float32):
            for op, inputs in GATES.values():
                gate_up = torch.empty(4096, 8, 2 * 4096, dtype=dtype, requires_grad=True)
                op.named("triton").function(inputs(gate_up)).sum().backward()


@pytest.mark.slow
def test_triton_gates_compile_for_a_hopper_gpu_without_spills() -> None:
    launches, buffers = compile_calls("tests.ops.gate.test_kernels", "shipped")
    assert [launch.kernel for launch in launches] == ["_forward", "_backward"] * 4
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert max(buffers) == 4096 * 8 * 2 * 4096
