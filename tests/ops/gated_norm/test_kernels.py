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
    gated_norm,
    gated_scale,
    gated_squares,
)
from tests.ops.compiling import compile_calls

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
    found = results("triton", [t.to(device) for t in tensors], [t.to(device) for t in grads])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


def assert_whole_right(y: Tensor, z: Tensor, weight: Tensor, groups: int, tolerance: float) -> None:
    grad = torch.randn(y.shape).to(y.dtype)
    given = {"reference": [t.double() for t in (y, z, weight, grad)]}
    given["triton"] = [t.to(compute_device()) for t in (y, z, weight, grad)]
    found = {}
    for implementation, (*tensors, back) in given.items():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with force(implementation):
            out = gated_norm(GatedNormInputs(*leaves, groups, 1e-5))
        found[implementation] = [out.detach(), *torch.autograd.grad(out, leaves, back)]
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


def inputs(rows: int, length: int, heads: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    y, z = (torch.randn(rows, length, heads, size).to(dtype) for _ in range(2))
    return [y, z, torch.rand(rows, length, heads) + 0.5, torch.randn(heads, size).to(dtype)]


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 5), (4, 8), (5, 64), (3, 600)])
def test_any_heads_and_channels(heads: int, size: int) -> None:
    assert_right(inputs(2, 3, heads, size), FP32)


def test_bf16() -> None:
    """The interpreter truncates to bf16: an error of up to 2^-7 of each value."""
    assert_right(inputs(2, 3, 4, 8, torch.bfloat16), 2**-7)


@pytest.mark.parametrize(("channels", "groups"), [(5, 1), (15, 3), (32, 4), (600, 1)])
def test_any_groups(channels: int, groups: int) -> None:
    assert_whole_right(*torch.randn(2, 2, 3, channels), torch.randn(channels), groups, FP32)


@pytest.mark.usefixtures("four_shares")
def test_groups_whose_tokens_come_first_beside_others() -> None:
    y = torch.randn(5, 2, 12).transpose(0, 1)
    z = torch.randn(5, 2, 12 + 7)[..., :12].transpose(0, 1)
    assert_whole_right(y, z, torch.randn(12), 2, FP32)
    assert_whole_right(y.bfloat16(), z.bfloat16(), torch.randn(12).bfloat16(), 2, 2**-6)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.usefixtures("four_shares")
def test_more_tokens_than_shares_and_fewer(length: int) -> None:
    assert_right(inputs(2, length, 3, 4), FP32)


def test_tokens_first_and_a_gate_that_lies_beside_others() -> None:
    y = torch.randn(5, 2, 3, 4).transpose(0, 1)
    z = torch.randn(5, 2, 3 * 4 + 7)[..., : 3 * 4].transpose(0, 1).unflatten(-1, (3, 4))
    assert_right([y, z, torch.rand(2, 5, 3) + 0.5, torch.randn(3, 4)], FP32)


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
            whole = (y.flatten(2), z.flatten(2), weight.flatten(), 1, 1e-5)
            gated_norm.named("triton").function(GatedNormInputs(*whole)).sum().backward()
            gated_squares.named("triton").function(GatedSquaresInputs(y, z)).sum().backward()
            gated_scale.named("triton").function(GatedScaleInputs(y, z, scale, weight)).sum().backward()


@pytest.mark.slow
def test_they_compile_for_a_hopper_gpu_without_spills() -> None:
    launches, _ = compile_calls("tests.ops.gated_norm.test_kernels", "shipped")
    parts = {"_norm", "_squares", "_scale"}
    assert {launch.kernel for launch in launches} == parts | {f"{part}_backward" for part in parts}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert all(launch.waves() == 1 for launch in launches if launch.kernel == "_norm_backward")
