"""The Triton kernels for angles and for rotated keys and queries: every gradient, compared with float64 references.

Without CUDA they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.turns import AngleInputs, TurnInputs, angles, turn_pairs
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")


def inputs_of(
    rows: int, length: int, groups: int, heads: int, size: int, angles: int, dtype: torch.dtype
) -> TurnInputs:
    k, q = (torch.randn(rows, length, groups, size, dtype=dtype) for _ in range(2))
    biases = (torch.randn(heads, size) for _ in range(2))
    found = TurnInputs(k, q, *biases, 3 * torch.randn(rows, length, heads, angles))
    return TurnInputs(*(tensor.requires_grad_() for tensor in found))


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
def test_they_equal_the_reference(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    inputs = inputs_of(*sizes, dtype)
    device = compute_device()
    exact = results("reference", TurnInputs(*(t.detach().double().requires_grad_() for t in inputs)))
    found = results("triton", TurnInputs(*(t.detach().to(device).requires_grad_() for t in inputs)))
    for name, one, other in zip(("k", "q", *inputs._fields), found, exact, strict=True):
        assert one.dtype == (dtype if "bias" not in name and "angles" not in name else torch.float32), name
        assert (one.cpu().double() - other).norm() <= tolerance * other.norm(), name


def angle_results(form: str, inputs: AngleInputs) -> list[torch.Tensor]:
    """Points on the circle, as angles may differ by full turns, and the gradients of steps and rates."""
    given = AngleInputs(*(t.detach().requires_grad_() for t in inputs[:2]), inputs.documents_BL)
    with force(angles=form):
        theta = angles(given)
    weights = torch.linspace(-1, 2, theta.numel(), dtype=theta.dtype, device=theta.device).view_as(theta)
    return [theta.cos(), theta.sin(), *torch.autograd.grad((theta * weights).sum(), given[:2])]


@pytest.mark.parametrize(
    "documents",
    [None, [[32, 5, 33], [70]], pytest.param([[31, 1, 38], [1, 1, 68]], marks=pytest.mark.slow)],
    ids=["one", "at a block's border", "around borders"],
)
def test_angles_equal_the_reference(documents: list[list[int]] | None) -> None:
    """Use three blocks, the last of which is not full."""
    index = None
    if documents is not None:
        index = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents])
    inputs = AngleInputs(torch.rand(2, 70, 2), 3 * torch.randn(2, 70, 3), index)
    device = compute_device()
    wide = AngleInputs(*(tensor.double() for tensor in inputs[:2]), index)
    moved = AngleInputs(*(t if t is None else t.to(device) for t in inputs))
    for one, other in zip(angle_results("triton", moved), angle_results("reference", wide), strict=True):
        assert one.dtype == torch.float32
        assert (one.cpu().double() - other).norm() <= 3e-6 * other.norm()


def test_no_number_of_a_document_is_in_the_angles_of_another() -> None:
    steps = torch.rand(1, 40, 1)
    rates = torch.randn(1, 40, 2)
    documents = torch.arange(2).repeat_interleave(torch.tensor([18, 22]))[None]
    steps[0, 3] = torch.nan
    with force(angles="triton"):
        found = angles(AngleInputs(steps, rates, documents))
        alone = angles(AngleInputs(steps[:, 18:], rates[:, 18:]))
    assert found[0, 3:18].isnan().all()
    torch.testing.assert_close(found[:, 18:], alone, rtol=0, atol=1e-5)


def test_large_angles_are_reduced() -> None:
    """The points on the circle are within 2e-7 of those in float64."""
    theta = torch.linspace(-40_000, 40_000, 64).view(1, 64, 1, 1)
    with force(turn_pairs="triton"):
        k, _ = turn_pairs(TurnInputs(*torch.tensor([1.0, 0.0]).expand(2, 1, 64, 1, 2), *torch.zeros(2, 1, 2), theta))
    exact = torch.cat((theta.double().cos(), theta.double().sin()), dim=3)
    assert (k.cpu() - exact).abs().max() < 2e-7


def test_what_they_do_not_take() -> None:
    form = turn_pairs.named("triton")
    assert form.device == "cuda"
    assert form.unsupported_reason(inputs_of(1, 3, 1, 2, 8, 4, torch.bfloat16)) is None
    assert "257" in form.unsupported_reason(inputs_of(1, 3, 1, 1, 257, 4, torch.bfloat16))


def shipped() -> None:
    """Forward and backward at the sizes of the recipes, and at the largest that are taken."""
    for dtype, heads, size in ((torch.bfloat16, 48, 128), (torch.float32, 48, 128), (torch.bfloat16, 64, 256)):
        with torch.device("meta"):
            inputs = inputs_of(8, 4096, 1, heads, size, size // 4, dtype)
        made = turn_pairs.named("triton").function(inputs)
        torch.autograd.backward(made, [torch.empty_like(t) for t in made])
        for documents in (None, torch.empty(8, 4096, dtype=torch.int32, device="meta")):
            steps, rates = (torch.empty(8, 4096, n, device="meta", requires_grad=True) for n in (heads, size // 4))
            theta = angles.named("triton").function(AngleInputs(steps, rates, documents))
            theta.backward(torch.empty_like(theta))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_shipped_fits_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_turn", "_turn_back", "_sums", "_carry", "_angles", "_gradients"}
    assert max(launch.stack for launch in launches) == 0
    assert max(launch.registers for launch in launches) <= 255
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) <= 8 * 4096 * 64 * 256
