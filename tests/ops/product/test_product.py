"""Products by oneDNN: factors that lie anywhere, gradients, threads, and where it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.ops.dispatch import force
from hybridtron.ops.product import LinearInputs, ProductInputs, linear, matrix_product, onednn

NO_ONEDNN = "this torch has no oneDNN"
pytestmark = pytest.mark.skipif(onednn.missing() == NO_ONEDNN, reason=NO_ONEDNN)


def lying(kind: str, *shape: int) -> Tensor:
    """Tokens as mixers have them: dense, with rows and tokens exchanged, or some channels of a wider projection."""
    if kind == "turned":
        return torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return torch.randn(*shape[:-1], 3 * shape[-1])[..., : shape[-1]] if kind == "part" else torch.randn(shape)


@pytest.mark.parametrize("kind", ["dense", "turned", "part"])
@pytest.mark.parametrize(("inside", "outside"), [(12, 40), (40, 12), (1030, 7)])
def test_linear_is_a_projection(kind: str, inside: int, outside: int) -> None:
    x = lying(kind, 2, 300, inside).requires_grad_()
    weight = torch.randn(outside, inside, requires_grad=True)
    grad = lying(kind, 2, 300, outside)
    with force(linear="onednn"):
        y = linear(LinearInputs(x, weight))
    found = [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = functional.linear(wide[0], wide[1])
    expected = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
    theirs = functional.linear(x, weight)
    torch_own = [theirs.detach(), *torch.autograd.grad(theirs, (x, weight), grad)]
    for ours, other, true in zip(found, torch_own, expected, strict=True):
        errors = [((each - true).abs().max() / true.abs().max()).item() for each in (ours, other)]
        assert errors[0] <= 4 * errors[1] + 3e-7


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", [(20, 30, 40), (700, 1100, 9), (9, 1100, 700)])
def test_a_product_of_any_factors(sizes: tuple[int, int, int], turned: bool) -> None:
    rows, depth, columns = sizes
    left = torch.randn(depth, rows).t() if turned else torch.randn(rows, depth)
    right = torch.randn(depth, columns)
    found = matrix_product.named("onednn").function(ProductInputs(left, right))
    expected = left.double() @ right.double()
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_the_bits_do_not_depend_on_the_threads() -> None:
    left = torch.randn(1000, 200)
    right = torch.randn(200, 300)
    before = torch.get_num_threads()
    made = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            factors = (left, right), (right.t(), left.t())
            made += [matrix_product.named("onednn").function(ProductInputs(*each)) for each in factors]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(made[i % 2], each) for i, each in enumerate(made))


@pytest.mark.parametrize(
    ("about", "runs"),
    [
        ("vendor_id: AuthenticAMD\nflags: avx2 avx512f\n", True),
        ("vendor_id: AuthenticAMD\nflags: avx2\n", False),
        ("vendor_id: GenuineIntel\nflags: avx2 avx512f\n", False),
    ],
)
def test_it_runs_where_it_is_faster(about: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn.Path, "read_text", lambda self: about)
    reason = onednn.missing.__wrapped__()
    assert reason is None if runs else "AMD" in reason


def test_reasons_say_what_is_not_supported() -> None:
    asked = linear.named("onednn").unsupported_reason
    weight = torch.randn(4, 8)
    many = torch.randn(2, onednn.LEAST // 64, 8)
    assert asked(LinearInputs(many, weight)) is None
    assert "bf16" in asked(LinearInputs(many.bfloat16(), weight.bfloat16()))
    assert f"{onednn.LEAST:,} factors" in asked(LinearInputs(many[:, 2:], weight))
    product = matrix_product.named("onednn").unsupported_reason
    assert product(ProductInputs(many[0], torch.randn(8, 8))) is None
    assert product(ProductInputs(many[0], torch.randn(8, 7))) is not None
