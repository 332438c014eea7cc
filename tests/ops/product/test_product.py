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
    if kind == "part":
        return torch.randn(*shape[:-1], 3 * shape[-1])[..., : shape[-1]]
    return torch.randn(shape)


@pytest.mark.parametrize("kind", ["dense", "turned", "part"])
@pytest.mark.parametrize(("inside", "outside"), [(12, 40), (40, 12), (1030, 7)])
def test_onednn_linear_is_as_exact_as_torch(kind: str, inside: int, outside: int) -> None:
    x = lying(kind, 2, 300, inside).requires_grad_()
    weight = torch.randn(outside, inside, requires_grad=True)
    grad = lying(kind, 2, 300, outside)
    with force(linear="onednn"):
        y = linear(LinearInputs(x, weight))
    actual = [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = functional.linear(wide[0], wide[1])
    expected = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
    theirs = functional.linear(x, weight)
    torch_own = [theirs.detach(), *torch.autograd.grad(theirs, (x, weight), grad)]
    for ours, other, true in zip(actual, torch_own, expected, strict=True):
        error, torch_error = (((y - true).abs().max() / true.abs().max()).item() for y in (ours, other))
        assert error <= 4 * torch_error + 3e-7


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", [(20, 30, 40), (700, 1100, 9), (9, 1100, 700)])
def test_onednn_product_equals_torch_in_float64(sizes: tuple[int, int, int], turned: bool) -> None:
    rows, depth, columns = sizes
    left = torch.randn(rows, depth)
    if turned:
        left = torch.randn(depth, rows).t()
    right = torch.randn(depth, columns)
    actual = matrix_product.named("onednn").function(ProductInputs(left, right))
    expected = left.double() @ right.double()
    assert (actual - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("terms", "depths"),
    [(0, [0]), (500, [500]), (512, [512]), (575, [575]), (576, [512, 64]), (1040, [512, 528]), (1100, [512, 512, 76])],
)
def test_last_partial_sum_has_no_few_terms(terms: int, depths: list[int]) -> None:
    assert onednn.partial_sums(terms) == depths


def test_bits_of_onednn_products_do_not_depend_on_threads() -> None:
    left = torch.randn(1000, 200)
    right = torch.randn(200, 300)
    before = torch.get_num_threads()
    function = matrix_product.named("onednn").function
    products = []
    transposed = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            products.append(function(ProductInputs(left, right)))
            transposed.append(function(ProductInputs(right.t(), left.t())))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(products[0], product) for product in products)
    assert all(torch.equal(transposed[0], product) for product in transposed)


@pytest.mark.parametrize(
    ("about", "runs"),
    [
        ("vendor_id: AuthenticAMD\nflags: avx2 avx512f\n", True),
        ("vendor_id: AuthenticAMD\nflags: avx2\n", False),
        ("vendor_id: GenuineIntel\nflags: avx2 avx512f\n", False),
    ],
)
def test_onednn_runs_on_amd_cpus_with_avx512_alone(about: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn.Path, "read_text", lambda self: about)
    reason = onednn.missing.__wrapped__()
    if runs:
        assert reason is None
    else:
        assert "AMD" in reason


def test_onednn_refuses_unsupported_inputs() -> None:
    asked = linear.named("onednn").unsupported_reason
    weight = torch.randn(4, 8)
    many = torch.randn(2, onednn.LEAST // 64, 8)
    assert asked(LinearInputs(many, weight)) is None
    assert "bf16" in asked(LinearInputs(many.bfloat16(), weight.bfloat16()))
    assert f"{onednn.LEAST:,}" in asked(LinearInputs(many[:, 2:], weight))
    product = matrix_product.named("onednn").unsupported_reason
    assert product(ProductInputs(many[0], torch.randn(8, 8))) is None
    assert product(ProductInputs(many[0], torch.randn(8, 7))) is not None
