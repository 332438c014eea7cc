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
    RouteInputs,
    Router,
    Routing,
    ToExpertsInputs,
    expert_choice,
    expert_order,
    from_experts,
    loads_of,
    route,
    to_experts,
)
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")

OPTIONS = [
    Router(1),
    Router(4, normalise=True, scale=2.5),
    Router(12, "sigmoid", normalise=True),
    Router(3, "sigmoid", groups=4, group_limit=2),
    Router(4, groups=12, group_limit=5, scale=0.5),
    Router(2, groups=3, group_limit=1),
]


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


@pytest.fixture
def kernels_of_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels add two parts or tiles at a time, so that small inputs take several rounds."""
    from hybridtron.ops.experts import kernels_order, kernels_route  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels_order, "PARTS_TOGETHER", 2)
    monkeypatch.setattr(kernels_route, "TILES_TOGETHER", 2)


def routed(form: str, logits: Tensor, correction: Tensor | None, options: Router) -> tuple[Routing, Tensor]:
    """Return the routing, and the gradient of the logits for fixed slopes of weights and scores."""
    logits = logits.detach().requires_grad_()
    routing = route.named(form).function(RouteInputs(logits, correction, options))
    slopes = torch.linspace(-1, 2, routing.weights_TK.numel(), device=logits.device).view_as(routing.weights_TK)
    score_slopes = torch.linspace(1, -1, logits.numel(), device=logits.device).view_as(logits)
    loss = (routing.weights_TK * slopes).sum() + (routing.scores_TE * score_slopes).sum()
    return routing, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_triton_routing_equals_the_reference(
    options: Router, corrected: bool, tokens: int, kernels_of_few_parts: None
) -> None:
    """300 tokens: three tiles, which a program adds in two rounds."""
    logits = 3 * torch.randn(tokens, 12)
    correction = torch.randn(12) if corrected else None
    device = compute_device()
    on_device = None if correction is None else correction.to(device)
    ours, our_gradient = routed("triton", logits.to(device), on_device, options)
    theirs, their_gradient = routed("reference", logits.double(), correction, options)
    assert torch.equal(ours.experts_TK.cpu(), theirs.experts_TK)
    assert torch.equal(ours.loads_E.cpu(), theirs.loads_E)
    assert [value.dtype for value in ours] == [torch.int64, torch.float32, torch.int64, torch.float32, torch.float64]
    torch.testing.assert_close(ours.weights_TK.cpu().double(), theirs.weights_TK, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.scores_TE.cpu().double(), theirs.scores_TE, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.entropy.cpu(), theirs.entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(our_gradient.cpu().double(), their_gradient, rtol=1e-5, atol=1e-6)


def test_triton_routing_takes_gradients_for_one_output_alone() -> None:
    logits = torch.randn(20, 12, device=compute_device(), requires_grad=True)
    options = Router(3, "sigmoid", normalise=True, scale=2.5)
    for output in ("weights_TK", "scores_TE"):
        gradients = []
        for form in ("triton", "reference"):
            routing = route.named(form).function(RouteInputs(logits, None, options))
            gradients += torch.autograd.grad(getattr(routing, output).square().sum(), logits)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("values", [2, 1000])
def test_triton_choice_equals_the_reference_at_ties_too(options: Router, values: int) -> None:
    """Equal logits have equal scores in either form; the reference chooses from the kernel's scores."""
    logits = torch.randint(values, (300, 12)).float() / values
    for correction in (None, torch.randint(-values, values, (12,)).float() / values):
        device = compute_device()
        on_device = None if correction is None else correction.to(device)
        routing = route.named("triton").function(RouteInputs(logits.to(device), on_device, options))
        expected = expert_choice.reference.function(ChoiceInputs(routing.scores_TE.cpu(), correction, options))
        assert torch.equal(routing.experts_TK.cpu(), expected)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_triton_choice_of_values_that_are_no_numbers_stays_among_experts(scores: Any) -> None:
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
    logits = values[torch.randint(0, 4, (200, 5))].to(compute_device())
    chosen = route.named("triton").function(RouteInputs(logits, None, Router(5, scores))).experts_TK
    assert (chosen.sort(1).values.cpu() == torch.arange(5)).all()


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 5), (1, 1, 1), (9, 2, 6), (700, 3, 7), (300, 1, 1024)])
def test_triton_order_equals_the_reference(tokens: int, top_k: int, experts: int, kernels_of_few_parts: None) -> None:
    """700 tokens: several parts, which a program adds in several rounds. Some experts have no choice."""
    chosen = torch.randint(experts, (tokens, top_k)) // 2
    inputs = ExpertOrderInputs(chosen, loads_of(chosen, experts))
    device = compute_device()
    actual = expert_order.named("triton").function(ExpertOrderInputs(*(value.to(device) for value in inputs)))
    expected = expert_order.reference.function(inputs)
    for ours, theirs in zip(actual[:3], expected[:3], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


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
    """Launch the kernels at a laptop's sizes, at those of a 30B model, and with the most channels and experts."""
    with torch.device("meta"):
        for tokens, top_k, channels in ((4096, 2, 192), (8192, 6, 2688), (512, 2, 2**14)):
            places = torch.empty(tokens, top_k, dtype=torch.int64)
            order = ExpertOrder(places.flatten(), places, torch.empty(8, dtype=torch.int32))
            x = torch.empty(tokens, channels, dtype=torch.bfloat16, requires_grad=True)
            weights = torch.empty(tokens, top_k, requires_grad=True)
            for experts, scores in ((8, "softmax"), (128, "sigmoid"), (512, "softmax")):
                logits = torch.empty(tokens, experts, requires_grad=True)
                for options in (Router(top_k, scores, True), Router(top_k, scores, groups=8, group_limit=4)):
                    inputs = RouteInputs(logits, torch.empty(experts), options)
                    routing = route.named("triton").function(inputs)
                    torch.autograd.backward(
                        [routing.weights_TK, routing.scores_TE], [torch.empty(tokens, top_k), torch.empty_like(logits)]
                    )
                expert_order.named("triton").function(ExpertOrderInputs(places, routing.loads_E))
            for experts in (1, 60, 1024):
                logits = torch.empty(tokens, experts, requires_grad=True)
                routing = route.named("triton").function(RouteInputs(logits, None, Router(1)))
                torch.autograd.backward(routing.weights_TK, torch.empty(tokens, 1))
                expert_order.named("triton").function(ExpertOrderInputs(places[:, :1], routing.loads_E))
            rows = to_experts.named("triton").function(ToExpertsInputs(x, order))
            y = from_experts.named("triton").function(FromExpertsInputs(rows, weights, order))
            torch.autograd.backward(y, torch.empty_like(x))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, _ = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {
        "_choose", "_total", "_logit_gradients", "_count", "_starts", "_place", "_copy", "_add", "_spread",
    }  # fmt: skip
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
