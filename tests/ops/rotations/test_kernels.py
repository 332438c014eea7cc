"""The Triton kernels for angles and for rotated keys and queries: every gradient, compared with float64 references.

Without CUDA they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.rotations import AngleInputs, TurnInputs, angles, turn_pairs
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")


def inputs_of(
    rows: int, length: int, groups: int, heads: int, size: int, angles: int, dtype: torch.dtype
) -> TurnInputs:
    k, q = (torch.randn(rows, length, groups, size, dtype=dtype) for _ in range(2))
    k_bias, q_bias = (torch.randn(heads, size) for _ in range(2))
    theta = 3 * torch.randn(rows, length, heads, angles)
    return TurnInputs(*(tensor.requires_grad_() for tensor in (k, q, k_bias, q_bias, theta)))


def results(form: str, inputs: TurnInputs) -> list[torch.Tensor]:
    with force(turn_pairs=form):
        k, q = turn_pairs(inputs)
    weights = torch.linspace(-64, 128, k.numel(), device=k.device).round().view_as(k) / 64
    loss = (weights.to(k.dtype) * k).sum() + (weights.flip(0).to(q.dtype) * q).sum()
    return [k, q, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "tolerance"),
    [
        pytest.param((2, 19, 2, 4, 10, 3), torch.float32, 1e-6, marks=pytest.mark.slow),
        ((1, 3, 1, 2, 7, 3), torch.float32, 1e-6),
        ((1, 3, 1, 2, 8, 4), torch.float16, 2**-10),
    ],
    ids=["two groups", "an odd channel", "halves"],
)
def test_triton_turns_equal_the_reference(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    inputs = inputs_of(*sizes, dtype)
    device = compute_device()
    exact = results("reference", TurnInputs(*(t.detach().double().requires_grad_() for t in inputs)))
    actual = results("triton", TurnInputs(*(t.detach().to(device).requires_grad_() for t in inputs)))
    for name, ours, theirs in zip(("k", "q", *inputs._fields), actual, exact, strict=True):
        in_fp32 = "bias" in name or "angles" in name
        assert ours.dtype == {True: torch.float32, False: dtype}[in_fp32], name
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm(), name


def angle_results(form: str, inputs: AngleInputs) -> list[torch.Tensor]:
    """Points on the circle, as angles may differ by full turns, and the gradients of steps and rates."""
    steps, rates = (t.detach().requires_grad_() for t in inputs[:2])
    with force(angles=form):
        theta = angles(AngleInputs(steps, rates, inputs.documents_BL))
    weights = torch.linspace(-1, 2, theta.numel(), dtype=theta.dtype, device=theta.device).view_as(theta)
    return [theta.cos(), theta.sin(), *torch.autograd.grad((theta * weights).sum(), (steps, rates))]


@pytest.mark.parametrize(
    "documents",
    [None, [[32, 5, 33], [70]], pytest.param([[31, 1, 38], [1, 1, 68]], marks=pytest.mark.slow)],
    ids=["one", "at a block's border", "around borders"],
)
def test_triton_angles_equal_the_reference(documents: list[list[int]] | None) -> None:
    """Use three blocks, the last of which is not full."""
    index = None
    if documents is not None:
        index = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents])
    inputs = AngleInputs(torch.rand(2, 70, 2), 3 * torch.randn(2, 70, 3), index)
    device = compute_device()
    wide = AngleInputs(*(tensor.double() for tensor in inputs[:2]), index)
    moved = AngleInputs(*(t if t is None else t.to(device) for t in inputs))
    for ours, theirs in zip(angle_results("triton", moved), angle_results("reference", wide), strict=True):
        assert ours.dtype == torch.float32
        assert (ours.cpu().double() - theirs).norm() <= 3e-6 * theirs.norm()


def test_angles_of_a_document_do_not_depend_on_another() -> None:
    steps = torch.rand(1, 40, 1)
    rates = torch.randn(1, 40, 2)
    documents = torch.arange(2).repeat_interleave(torch.tensor([18, 22]))[None]
    steps[0, 3] = torch.nan
    with force(angles="triton"):
        theta = angles(AngleInputs(steps, rates, documents))
        alone = angles(AngleInputs(steps[:, 18:], rates[:, 18:]))
    assert theta[0, 3:18].isnan().all()
    torch.testing.assert_close(theta[:, 18:], alone, rtol=0, atol=1e-5)


def test_triton_turns_are_exact_at_large_angles() -> None:
    """The points on the circle are within 2e-7 of those in float64."""
    theta = torch.linspace(-40_000, 40_000, 64).view(1, 64, 1, 1)
    with force(turn_pairs="triton"):
        x = torch.tensor([1.0, 0.0]).expand(1, 64, 1, 2)
        no_bias = torch.zeros(1, 2)
        k, _ = turn_pairs(TurnInputs(x, x, no_bias, no_bias, theta))
    exact = torch.cat((theta.double().cos(), theta.double().sin()), dim=3)
    assert (k.cpu() - exact).abs().max() < 2e-7


def test_triton_turns_refuse_unsupported_sizes() -> None:
    form = turn_pairs.named("triton")
    assert form.device == "cuda"
    assert form.unsupported_reason(inputs_of(1, 3, 1, 2, 8, 4, torch.bfloat16)) is None
    assert "257" in form.unsupported_reason(inputs_of(1, 3, 1, 1, 257, 4, torch.bfloat16))


def shipped() -> None:
    """Forward and backward at the sizes of the recipes, and at the largest that are taken."""
    for dtype, heads, size in ((torch.bfloat16, 48, 128), (torch.float32, 48, 128), (torch.bfloat16, 64, 256)):
        with torch.device("meta"):
            inputs = inputs_of(8, 4096, 1, heads, size, size // 4, dtype)
        outputs = turn_pairs.named("triton").function(inputs)
        torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
        for documents in (None, torch.empty(8, 4096, dtype=torch.int32, device="meta")):
            steps, rates = (torch.empty(8, 4096, n, device="meta", requires_grad=True) for n in (heads, size // 4))
            theta = angles.named("triton").function(AngleInputs(steps, rates, documents))
            theta.backward(torch.empty_like(theta))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    kernels = {"_turn", "_turn_back", "_sum_of_parts", "_sums", "_carry", "_angles", "_gradients"}
    assert {launch.kernel for launch in launches} == kernels
    assert max(launch.stack for launch in launches) == 0
    assert max(launch.registers for launch in launches) <= 255
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) <= 8 * 4096 * 64 * 256
