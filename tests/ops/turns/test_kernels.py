"""The Triton kernels that turn keys and queries against the reference in float64: results, every gradient.

Without CUDA they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.turns import TurnInputs, turn_pairs
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
    inputs, device = inputs_of(*sizes, dtype), compute_device()
    exact = results("reference", TurnInputs(*(t.detach().double().requires_grad_() for t in inputs)))
    found = results("triton", TurnInputs(*(t.detach().to(device).requires_grad_() for t in inputs)))
    for name, one, other in zip(("k", "q", *inputs._fields), found, exact, strict=True):
        assert one.dtype == (dtype if "bias" not in name and "angles" not in name else torch.float32), name
        assert (one.cpu().double() - other).norm() <= tolerance * other.norm(), name


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_shipped_fits_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_turn", "_turn_back"}
    # nothing is spilled: sine and cosine have a little of the stack for angles beyond 100,000, which none of these is
    assert max(launch.stack for launch in launches) <= 96
    assert max(launch.registers for launch in launches) <= 255
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) <= 8 * 4096 * 64 * 256
