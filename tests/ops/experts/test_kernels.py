"""The Triton kernels of experts against the references in float64, and as compiled for a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.experts import (
    ChoiceInputs,
    ExpertOrder,
    ExpertOrderInputs,
    FromExpertsInputs,
    Router,
    ToExpertsInputs,
    expert_choice,
    expert_order,
    from_experts,
    loads_of,
    to_experts,
)
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")


def order_of(tokens: int, top_k: int) -> ExpertOrder:
    chosen = torch.rand(tokens, 6).argsort(1)[:, :top_k].contiguous()
    return expert_order(ExpertOrderInputs(chosen, loads_of(chosen, 6)))


def results(form: str, x: Tensor, rows: Tensor, weights: Tensor, order: ExpertOrder, slopes: Tensor) -> list[Tensor]:
    """Return the rows of tokens, the sums of rows, and the gradients of tokens, rows and weights."""
    leaves = [value.detach().requires_grad_() for value in (x, rows, weights)]
    with force(form):
        to = to_experts(ToExpertsInputs(leaves[0], order))
        y = from_experts(FromExpertsInputs(leaves[1], leaves[2], order))
    (of_x,) = torch.autograd.grad(to, leaves[0], rows)
    return [to.detach(), y.detach(), of_x, *torch.autograd.grad(y, leaves[1:], slopes)]


@pytest.mark.parametrize(("tokens", "top_k", "channels"), [(1, 1, 3), (9, 2, 8), (5, 3, 20), (3, 6, 300), (70, 2, 33)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_triton_rows_equal_the_reference(
    tokens: int, top_k: int, channels: int, dtype: torch.dtype, close: float
) -> None:
    """The interpreter truncates to bf16: an error of up to 2^-7 of each value."""
    order = order_of(tokens, top_k)
    x, slopes = torch.randn(2, tokens, channels).to(dtype)
    rows = torch.randn(tokens * top_k, channels).to(dtype)
    weights = torch.rand(tokens, top_k)
    expected = results("reference", *(v.double() for v in (x, rows, weights)), order, slopes.double())
    device = compute_device()
    order_on_device = ExpertOrder(*(v.to(device) for v in order[:3]), order.has_slots)
    actual = results("triton", *(v.to(device) for v in (x, rows, weights)), order_on_device, slopes.to(device))
    for ours, theirs, wanted in zip(actual, expected, (dtype, dtype, dtype, dtype, torch.float32), strict=True):
        assert ours.dtype == wanted
        assert (ours.cpu().double() - theirs).norm() <= close * theirs.norm()


@pytest.mark.parametrize(
    "options",
    [Router(1), Router(4), Router(12), Router(3, groups=4, group_limit=2), Router(4, groups=12, group_limit=5),
     Router(2, groups=3, group_limit=1)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("values", [2, 1000])
def test_triton_choice_equals_the_reference_at_ties_too(options: Router, values: int) -> None:
    scores = torch.randint(values, (300, 12)).float() / values
    for correction in (None, torch.randint(-values, values, (12,)).float() / values):
        expected = expert_choice.reference.function(ChoiceInputs(scores, correction, options))
        device = compute_device()
        correction_on_device = None if correction is None else correction.to(device)
        actual = expert_choice.named("triton").function(ChoiceInputs(scores.to(device), correction_on_device, options))
        assert torch.equal(actual.cpu(), expected)


def test_triton_choice_of_values_that_are_no_numbers_stays_among_experts() -> None:
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
    scores = values[torch.randint(0, 4, (200, 5))].to(compute_device())
    chosen = expert_choice.named("triton").function(ChoiceInputs(scores, None, Router(5)))
    assert (chosen.sort(1).values.cpu() == torch.arange(5)).all()


def test_each_pass_launches_one_kernel_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads tokens and writes rows, or the reverse, and nothing else touches the activations."""
    from hybridtron.ops.experts import kernels  # not above: imported again for the interpreter

    launched = []
    launch = kernels.launch

    def noted(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(kernels, "launch", noted)
    device = compute_device()
    order = ExpertOrder(*(v.to(device) for v in order_of(9, 2)[:3]))
    x, slopes = torch.randn(2, 9, 8, device=device)
    results("triton", x, torch.randn(18, 8, device=device), torch.rand(9, 2, device=device), order, slopes)
    assert launched == ["_copy", "_add", "_add", "_spread"]


def test_repeated_calls_give_equal_bits() -> None:
    device = compute_device()
    order = ExpertOrder(*(v.to(device) for v in order_of(20, 4)[:3]))
    x, slopes = torch.randn(2, 20, 40, device=device)
    rows = torch.randn(80, 40, device=device)
    weights = torch.rand(20, 4, device=device)
    first, second = (results("triton", x, rows, weights, order, slopes) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def shipped() -> None:
    """Launch the kernels at a laptop's sizes, at those of a 30B model, and with the most channels."""
    with torch.device("meta"):
        for tokens, top_k, channels in ((4096, 2, 192), (8192, 6, 2688), (512, 2, 2**14)):
            places = torch.empty(tokens, top_k, dtype=torch.int64)
            order = ExpertOrder(places.flatten(), places, torch.empty(8, dtype=torch.int32))
            x = torch.empty(tokens, channels, dtype=torch.bfloat16, requires_grad=True)
            weights = torch.empty(tokens, top_k, requires_grad=True)
            scores = torch.empty(tokens, 128)
            for options in (Router(top_k), Router(top_k, groups=8, group_limit=4)):
                expert_choice.named("triton").function(ChoiceInputs(scores, torch.empty(128), options))
            rows = to_experts.named("triton").function(ToExpertsInputs(x, order))
            y = from_experts.named("triton").function(FromExpertsInputs(rows, weights, order))
            torch.autograd.backward(y, torch.empty_like(x))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, _ = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_choose", "_copy", "_add", "_spread"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
