"""The Triton kernels of step sizes and log decays against the reference in float64, and compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.delta import DeltaGateInputs, delta_gates
from hybridtron.ops.dispatch import force
from tests.ops.compiling import assert_gates_fit, compile_calls
from tests.ops.delta.test_gates import random_inputs

pytestmark = pytest.mark.usefixtures("interpreter")
FP32 = 1e-6  # of a tensor's norm


def results(form: str, fields: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return beta and g, and the gradients of all tensors."""
    leaves = [x.detach().requires_grad_() for x in fields]
    with force(delta_gates=form):
        outputs = delta_gates(DeltaGateInputs(*leaves, reach=2.0))
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def assert_right(fields: list[Tensor], tolerance: float) -> list[Tensor]:
    (a, b), heads = fields[:2], len(fields[3])
    grads = [torch.randn(b.shape), torch.randn(*a.shape[:2], heads, a.shape[2] // heads)]
    expected = results("reference", [x.double() for x in fields], [grad.double() for grad in grads])
    device = compute_device()
    actual = results("triton", [x.to(device) for x in fields], [grad.to(device) for grad in grads])
    dtypes = [torch.float32] * 2 + [x.dtype for x in fields]
    for ours, theirs, dtype in zip(actual, expected, dtypes, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()
    return actual


@pytest.mark.parametrize(("rows", "length", "heads", "group"), [(1, 1, 1, 1), (3, 7, 5, 1), (2, 5, 3, 6)])
def test_kernels_equal_the_reference(rows: int, length: int, heads: int, group: int) -> None:
    assert_right(random_inputs(rows, length, heads, group), FP32)


def test_programs_add_up_the_gradients_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.delta import kernels_gates  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels_gates, "TILE", 16)
    monkeypatch.setattr(kernels_gates, "programs_at_once", lambda warps, resident: 2)
    assert_right(random_inputs(3, 11, 4, 2), FP32)


def test_logits_in_bf16_are_computed_in_fp32() -> None:
    """Only the logits' gradients are rounded: the interpreter truncates to bf16, by up to 2^-7 of each value."""
    beta, g, *_, of_bias, of_A_log = assert_right(random_inputs(2, 5, 3, 2, torch.bfloat16), 2**-7)
    assert {x.dtype for x in (beta, g, of_bias, of_A_log)} == {torch.float32}
    fields = random_inputs(2, 5, 3, 2, torch.bfloat16)
    exact = delta_gates.reference.function(DeltaGateInputs(*(x.double() for x in fields), 2.0))
    with force(delta_gates="triton"):
        ours = delta_gates(DeltaGateInputs(*(x.to(compute_device()) for x in fields), 2.0))
    for value, truth in zip(ours, exact, strict=True):
        assert (value.cpu().double() - truth).norm() <= FP32 * truth.norm()


def test_logits_may_be_parts_of_one_projection() -> None:
    """Gradients of strided logits are right, and they have the logits' memory order."""
    ab_LBX = torch.randn(5, 2, 8)
    a, b = (part.transpose(0, 1) for part in ab_LBX.chunk(2, -1))
    _, _, of_a, of_b, *_ = assert_right([a, b, torch.randn(4), torch.randn(4)], FP32)
    assert of_a.transpose(0, 1).is_contiguous()
    assert of_b.transpose(0, 1).is_contiguous()


def shipped() -> None:
    """Launch the kernels at recipes' sizes: one decay per head (Gated DeltaNet), then one per key channel (KDA)."""
    with torch.device("meta"):
        for heads, group in ((8, 1), (8, 96), (32, 128)):
            a = torch.empty(4096, 8, heads * group, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
            b = torch.empty(4096, 8, heads, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
            parameters = torch.empty(heads * group, requires_grad=True), torch.empty(heads, requires_grad=True)
            outputs = delta_gates.named("triton").function(DeltaGateInputs(a, b, *parameters))
            torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    from hybridtron.ops.delta.kernels_gates import RESIDENT_WARPS  # not above: imported again for the interpreter

    launches, _ = compile_calls(__name__, "shipped")
    assert_gates_fit(launches, RESIDENT_WARPS)
