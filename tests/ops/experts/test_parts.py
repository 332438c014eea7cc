"""The parts of a mixture of experts, form by form: order, rows to and from experts, and one projection per expert."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from hybridtron.ops.dispatch import force
from hybridtron.ops.experts import (
    ActivatedInputs,
    ChoiceInputs,
    ExpertActivation,
    ExpertLinearInputs,
    ExpertOrder,
    ExpertOrderInputs,
    FromExpertsInputs,
    Router,
    RowMLPInputs,
    ToExpertsInputs,
    activated_again,
    expert_choice,
    expert_linear,
    expert_order,
    from_experts,
    loads_of,
    mlp_of_rows,
    native,
    to_experts,
)
from hybridtron.ops.experts.reference import activated

ORDERS = pytest.mark.parametrize("order_form", ["reference", "native"])
ROWS = pytest.mark.parametrize("form", ["reference", "gathered", "native"])
LOADS = pytest.mark.parametrize("loads", [[3, 0, 4, 1], [0, 0, 0, 5], [0, 0, 0, 0], [8, 1, 0, 0]])


def order_of(tokens: int, top_k: int, experts: int) -> tuple[Tensor, ExpertOrder]:
    """Return different random experts for each token, and their order."""
    chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    return chosen, expert_order(ExpertOrderInputs(chosen, loads_of(chosen, experts)))


@ORDERS
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 4), (50, 3, 7), (300, 2, 8)])
def test_order_is_by_expert_then_by_token(order_form: str, tokens: int, top_k: int, experts: int) -> None:
    with force(expert_order=order_form):
        chosen, order = order_of(tokens, top_k, experts)
    flat = chosen.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda n: (flat[n], n))
    assert order.source_N.tolist() == expected
    assert [expected[n] for n in order.place_TK.flatten().tolist()] == list(range(len(flat)))
    assert order.ends_E.tolist() == [sum(e <= last for e in flat) for last in range(experts)]
    assert order.ends_E.dtype == torch.int32


@ROWS
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 3), (20, 1), (20, 3)])
def test_rows_reach_their_places_and_their_sums_come_back(form: str, tokens: int, top_k: int) -> None:
    _, order = order_of(tokens, top_k, 5)
    x = torch.randn(tokens, 9, dtype=torch.float64)
    weights = torch.randn(tokens, top_k, dtype=torch.float64)
    with force(form):
        rows = to_experts(ToExpertsInputs(x, order))
        y = from_experts(FromExpertsInputs(rows, weights, order))
    assert rows.tolist() == [x[n // top_k].tolist() for n in order.source_N.tolist()]
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True), rtol=0, atol=1e-12)


@ROWS
def test_gradients_of_rows_are_the_slopes(form: str) -> None:
    _, order = order_of(6, 2, 4)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    with force(form):
        assert gradcheck(lambda x: to_experts(ToExpertsInputs(x, order)), (x,))
        assert gradcheck(lambda rows, weights: from_experts(FromExpertsInputs(rows, weights, order)), (rows, weights))


@pytest.mark.parametrize("form", ["gathered", "native"])
def test_narrow_rows_are_summed_in_fp32(form: str) -> None:
    _, order = order_of(40, 4, 8)
    rows = torch.randn(160, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(40, 4, requires_grad=True)
    slopes = torch.randn(40, 16, dtype=torch.bfloat16)
    x = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for name in ("reference", form):
        with force(name):
            y = from_experts(FromExpertsInputs(rows, weights, order))
            (of_x,) = torch.autograd.grad(to_experts(ToExpertsInputs(x, order)), x, rows.detach())
        results.append((y, *torch.autograd.grad(y, (rows, weights), slopes)))
        wide = torch.stack([rows.detach()[places].double().sum(0) for places in order.place_TK])
        if name != "reference":  # autograd adds bf16 rows in bf16
            torch.testing.assert_close(of_x.double(), wide, rtol=2**-8, atol=0.0)
    torch.testing.assert_close(results[1], results[0], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 15, 16, 300])
def test_compiled_rows_equal_the_gathered_at_all_sizes(channels: int, dtype: torch.dtype) -> None:
    """Rows fill no vector, or several; tokens and rows are slices of wider tensors, and lie in columns."""
    _, order = order_of(130, 3, 4)
    x, slopes = torch.randn(2, 130, 2 * channels, dtype=dtype)[..., :channels]
    rows = torch.randn(channels, 390, dtype=dtype).t().requires_grad_()
    weights = torch.rand(3, 130, dtype=torch.promote_types(dtype, torch.float32)).t().requires_grad_()
    x.requires_grad_()
    results = []
    for form in ("gathered", "native"):
        with force(form):
            to = to_experts(ToExpertsInputs(x, order))
            y = from_experts(FromExpertsInputs(rows, weights, order))
        grads = torch.autograd.grad(y, (rows, weights), slopes)
        results.append((to, y, *torch.autograd.grad(to, x, rows.detach()), *grads))
    close = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=close, atol=close)


def test_compiled_rows_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    _, order = order_of(1000, 2, 8)
    rows = torch.randn(2000, 40, requires_grad=True)
    weights = torch.rand(1000, 2, requires_grad=True)
    scores = torch.rand(1000, 8)
    results = []
    for count in (1, 3):
        monkeypatch.setattr(native, "threads", lambda worth, count=count: count)
        y = from_experts(FromExpertsInputs(rows, weights, order))
        to = to_experts(ToExpertsInputs(scores, order))
        choice = expert_choice(ChoiceInputs(scores, None, Router(2)))
        results.append((y, to, choice, *torch.autograd.grad(y.sum(), (rows, weights))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@LOADS
@pytest.mark.parametrize("form", ["reference", "looped"])
def test_expert_linear_is_a_product_for_each_row(form: str, loads: list[int]) -> None:
    ends = torch.tensor(loads).cumsum(0, dtype=torch.int32)
    owner = [e for e, load in enumerate(loads) for _ in range(load)]
    x = torch.randn(sum(loads), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(sum(loads), 5, dtype=torch.float64)
    with force(expert_linear=form):
        y = expert_linear(ExpertLinearInputs(x, weight, ends))
        grads = torch.autograd.grad(y, (x, weight), slopes)
    expected = (weight[owner] @ x[..., None])[..., 0]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weight), slopes), rtol=0, atol=1e-12)


@LOADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_equal_the_loop_bit_for_bit(loads: list[int], dtype: torch.dtype) -> None:
    ends = torch.tensor(loads).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(loads), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 24, 16, dtype=dtype, requires_grad=True)
    slopes = torch.randn(sum(loads), 24, dtype=dtype)
    results = []
    for form in ("looped", "grouped"):
        with force(expert_linear=form):
            y = expert_linear(ExpertLinearInputs(x, weight, ends))
            results.append((y, *torch.autograd.grad(y, (x, weight), slopes)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_looped_mlps_save_the_first_projection_alone() -> None:
    """Beside their inputs: the activation is computed again."""
    ends = torch.tensor([2, 5], dtype=torch.int32)
    inputs = torch.randn(5, 8, requires_grad=True), torch.randn(2, 12, 8), torch.randn(2, 8, 6)
    kept: list[Tensor] = []
    with force(mlp_of_rows="looped"), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, id):
        mlp_of_rows(RowMLPInputs(inputs[0], ends, *inputs[1:], "swiglu"))
    assert [tuple(x.shape) for x in kept] == [(5, 8), (2, 12, 8), (2, 8, 6), (2, 12), (3, 12)]


@pytest.mark.parametrize("form", ["reference", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "channels"), [(0, 5), (70, 5), (3, 300)])
def test_activation_again_has_the_bits_of_both_passes(form: str, dtype: torch.dtype, rows: int, channels: int) -> None:
    hidden = torch.randn(rows, 2 * channels, dtype=dtype, requires_grad=True)
    slopes = torch.randn(channels, rows, dtype=dtype).t()
    with force(form):
        active = activated(hidden, "swiglu")
        (of_hidden,) = torch.autograd.grad(active, hidden, slopes)
        again, parts = activated_again(ActivatedInputs(hidden, slopes, "swiglu"))
    assert torch.equal(again, active)
    assert torch.equal(torch.cat(parts, 1), of_hidden)
    assert all(part.is_contiguous() for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_looped_mlps_equal_the_reference_in_both_passes(dtype: torch.dtype, activation: ExpertActivation) -> None:
    """With an expert without rows, and sums of more terms than one partial sum has."""
    ends = torch.tensor([40, 40, 700], dtype=torch.int32)
    channels = 64 if activation == "swiglu" else 32
    shapes = ((700, 24), (3, channels, 24), (3, 24, 32))
    tensors = [torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]
    slopes = torch.randn(700, 24, dtype=torch.float64)
    results = []
    for form, of_dtype in (("reference", torch.float64), ("looped", dtype)):
        inputs = [x.to(of_dtype).requires_grad_() for x in tensors]
        with force(mlp_of_rows=form):
            y = mlp_of_rows(RowMLPInputs(inputs[0], ends, *inputs[1:], activation))
        results.append((y, *torch.autograd.grad(y, inputs, slopes.to(of_dtype))))
    for actual, expected in zip(results[1], results[0], strict=True):
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]


def test_frozen_experts_get_no_gradient() -> None:
    ends = torch.tensor([2, 5], dtype=torch.int32)
    x = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(2, 8, 8)
    for form in ("looped", "grouped"):
        with force(expert_linear=form):
            expert_linear(ExpertLinearInputs(x, weight, ends)).sum().backward()
    mlp_of_rows(RowMLPInputs(x, ends, weight, weight, "squared_relu")).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
