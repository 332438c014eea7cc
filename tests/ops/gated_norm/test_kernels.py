"""The Triton kernels of the gated norm against the reference in float64, and as compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.gated_norm import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    NormBeforeGateInputs,
    gated_norm,
    gated_scale,
    gated_squares,
    norm_before_gate,
)
from tests.ops.compiling import compile_calls
from tests.slow import slow_except

pytestmark = pytest.mark.usefixtures("interpreter")
FP32 = 1e-6  # of a tensor's norm


@pytest.fixture
def four_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.gated_norm import kernels  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels, "SHARES", 4)
    monkeypatch.setattr(kernels, "programs_at_once", lambda *_: 4)


def results(implementation: str, tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The sums, their gradients of y and z, the output, and its gradients of all four."""
    y, z, scale, weight = (tensor.detach().requires_grad_() for tensor in tensors)
    with force(implementation):
        squares = gated_squares(GatedSquaresInputs(y, z))
        out = gated_scale(GatedScaleInputs(y, z, scale, weight))
    of_squares = torch.autograd.grad(squares, (y, z), grads[0].to(squares.dtype))
    of_out = torch.autograd.grad(out, (y, z, scale, weight), grads[1].to(out.dtype))
    return [squares.detach(), *of_squares, out.detach(), *of_out]


def assert_right(tensors: list[Tensor], tolerance: float) -> None:
    grads = [torch.randn(tensors[2].shape), torch.randn(tensors[0].shape).to(tensors[0].dtype)]
    device = compute_device()
    expected = results("reference", [t.double() for t in tensors], [t.double() for t in grads])
    actual = results("triton", [t.to(device) for t in tensors], [t.to(device) for t in grads])
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


def assert_whole_right(y: Tensor, z: Tensor, weight: Tensor, groups: int, tolerance: float) -> None:
    grad = torch.randn(y.shape).to(y.dtype)
    tensors = {"reference": [t.double() for t in (y, z, weight, grad)]}
    tensors["triton"] = [t.to(compute_device()) for t in (y, z, weight, grad)]
    results = {}
    for implementation, (y, z, weight, grad) in tensors.items():
        leaves = [tensor.detach().requires_grad_() for tensor in (y, z, weight)]
        with force(implementation):
            out = gated_norm(GatedNormInputs(leaves[0], leaves[1], leaves[2], groups, 1e-5))
        results[implementation] = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for ours, theirs in zip(results["triton"], results["reference"], strict=True):
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


def inputs(rows: int, length: int, heads: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    y, z = (torch.randn(rows, length, heads, size).to(dtype) for _ in range(2))
    return [y, z, torch.rand(rows, length, heads) + 0.5, torch.randn(heads, size).to(dtype)]


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 5), (4, 8), (5, 64), (3, 600)])
def test_triton_gated_norm_equals_the_reference_at_any_size(heads: int, size: int) -> None:
    assert_right(inputs(2, 3, heads, size), FP32)


def test_triton_gated_norm_is_near_the_reference_in_bf16() -> None:
    """The interpreter truncates to bf16: an error of up to 2^-7 of each value."""
    assert_right(inputs(2, 3, 4, 8, torch.bfloat16), 2**-7)


@pytest.mark.parametrize(("channels", "groups"), [(5, 1), (15, 3), (32, 4), (600, 1)])
def test_triton_gated_norm_equals_the_reference_with_any_groups(channels: int, groups: int) -> None:
    y, z = torch.randn(2, 2, 3, channels)
    assert_whole_right(y, z, torch.randn(channels), groups, FP32)


@pytest.mark.usefixtures("four_shares")
def test_triton_gated_norm_accepts_groups_with_tokens_first_in_memory() -> None:
    y = torch.randn(5, 2, 12).transpose(0, 1)
    z = torch.randn(5, 2, 12 + 7)[..., :12].transpose(0, 1)
    assert_whole_right(y, z, torch.randn(12), 2, FP32)
    assert_whole_right(y.bfloat16(), z.bfloat16(), torch.randn(12).bfloat16(), 2, 2**-6)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.usefixtures("four_shares")
def test_triton_gated_norm_accepts_more_and_fewer_tokens_than_shares(length: int) -> None:
    assert_right(inputs(2, length, 3, 4), FP32)


def test_triton_gated_norm_accepts_tokens_first_and_a_gate_within_a_wider_tensor() -> None:
    y = torch.randn(5, 2, 3, 4).transpose(0, 1)
    z = torch.randn(5, 2, 3 * 4 + 7)[..., : 3 * 4].transpose(0, 1).unflatten(-1, (3, 4))
    assert_right([y, z, torch.rand(2, 5, 3) + 0.5, torch.randn(3, 4)], FP32)


def before_gate(implementation: str, tensors: list[Tensor], sigmoid: bool) -> list[Tensor]:
    """Return the output and its gradients of y, z and the weight; `tensors` are these and the output's gradient."""
    y, z, weight = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    with force(norm_before_gate=implementation):
        out = norm_before_gate(NormBeforeGateInputs(y, z, weight, 1e-5, sigmoid))
    return [out.detach(), *torch.autograd.grad(out, (y, z, weight), tensors[3])]


def assert_right_before_gate(tensors: list[Tensor], sigmoid: bool, tolerance: float) -> list[Tensor]:
    expected = before_gate("reference", [tensor.double() for tensor in tensors], sigmoid)
    actual = before_gate("triton", [tensor.to(compute_device()) for tensor in tensors], sigmoid)
    for ours, theirs, given in zip(actual, expected, (tensors[1], *tensors[:3]), strict=True):
        assert ours.dtype == given.dtype
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()
    return actual


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tiles of a few tokens, several of them in each program."""
    from hybridtron.ops.gated_norm import kernels_before  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels_before, "programs_at_once", lambda *_: 6)
    monkeypatch.setattr(kernels_before, "TILE", 32)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", slow_except([3, 5, 16, 40], 5, 40))
@pytest.mark.usefixtures("few_programs")
def test_triton_norm_before_gate_equals_the_reference(size: int, shared: bool, sigmoid: bool) -> None:
    weight = torch.randn(size) if shared else torch.randn(3, size)
    y, z, grad = torch.randn(3, 2, 7, 3, size)
    assert_right_before_gate([y, z, weight, grad], sigmoid, FP32)


@pytest.mark.usefixtures("few_programs")
def test_triton_norm_before_gate_accepts_tokens_first_and_a_gate_within_a_wider_tensor() -> None:
    y = torch.randn(2, 9, 3, 4)
    z = torch.randn(9, 2, 3 * 4 + 7)[..., : 3 * 4].transpose(0, 1).unflatten(-1, (3, 4))
    grad = torch.randn(9, 2, 3, 4).transpose(0, 1)
    out, grad_y, grad_z, _ = assert_right_before_gate([y, z, torch.randn(4), grad], False, FP32)
    assert grad_y.is_contiguous()
    assert out.transpose(0, 1).is_contiguous()
    assert grad_z.transpose(0, 1).is_contiguous()
    narrow = [tensor.bfloat16() for tensor in (y, z, torch.randn(4), grad)]
    assert_right_before_gate(narrow, False, 2**-6)


@pytest.mark.usefixtures("few_programs")
def test_repeated_norms_before_gates_give_equal_bits() -> None:
    tensors = [*torch.randn(3, 2, 7, 3, 5), torch.randn(5)]
    tensors = [tensors[0], tensors[1], tensors[3], tensors[2]]
    first, second = (before_gate("triton", tensors, sigmoid=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def shipped_before() -> None:
    """Launch the kernels of the norm before a gate at the sizes of recipes."""
    with torch.device("meta"):
        for heads, size, sigmoid in ((8, 192, False), (4, 256, False), (16, 128, True), (24, 64, False)):
            y = torch.empty(8, 4096, heads, size, dtype=torch.bfloat16, requires_grad=True)
            z = torch.empty(4096, 8, heads, size, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
            weight = torch.empty(size, requires_grad=True)
            norm_before_gate.named("triton").function(
                NormBeforeGateInputs(y, z, weight, 1e-5, sigmoid)
            ).sum().backward()


@pytest.mark.slow
def test_triton_norm_before_gate_compiles_for_a_hopper_gpu_without_spills() -> None:
    launches, _ = compile_calls("tests.ops.gated_norm.test_kernels", "shipped_before")
    assert {launch.kernel for launch in launches} == {"_forward", "_backward", "_sum_of_parts"}
    assert [fault for launch in launches for fault in launch.faults()] == []


def shipped() -> None:
    """Launch the kernels at the sizes of recipes."""
    with torch.device("meta"):
        for channels, groups in ((1024, 1), (4096, 8), (5120, 1)):
            y = torch.empty(16, 2048, channels, dtype=torch.bfloat16, requires_grad=True)
            z = torch.empty_like(y, requires_grad=True)
            weight = torch.empty(channels, requires_grad=True)
            gated_norm.named("triton").function(GatedNormInputs(y, z, weight, groups, 1e-5)).sum().backward()
        for heads, dtype in ((24, torch.bfloat16), (64, torch.bfloat16), (24, torch.float32)):
            y, z = (torch.empty(2048, 16, heads, 64, dtype=dtype).transpose(0, 1).requires_grad_() for _ in range(2))
            scale = torch.empty(16, 2048, heads).requires_grad_()
            weight = torch.empty(heads, 64, requires_grad=True)
            whole = GatedNormInputs(y.flatten(2), z.flatten(2), weight.flatten(), 1, 1e-5)
            gated_norm.named("triton").function(whole).sum().backward()
            gated_squares.named("triton").function(GatedSquaresInputs(y, z)).sum().backward()
            gated_scale.named("triton").function(GatedScaleInputs(y, z, scale, weight)).sum().backward()


@pytest.mark.slow
def test_triton_gated_norm_compiles_for_a_hopper_gpu_without_spills() -> None:
    launches, _ = compile_calls("tests.ops.gated_norm.test_kernels", "shipped")
    parts = {"_norm", "_squares", "_scale"}
    parts |= {f"{part}_backward" for part in parts} | {"_sum_of_parts"}
    assert {launch.kernel for launch in launches} == parts
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert all(launch.waves() == 1 for launch in launches if launch.kernel == "_norm_backward")
