"""The experts' MLPs: every form against a loop over tokens in float64, at corner cases, and finite differences."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtron.ops.dispatch import force, force_on_all_threads
from hybridtron.ops.experts import ExpertActivation, RouteInputs, Router, Routing, experts_mlp, loads_of, route
from tests.ops.experts import brute

FORMS = pytest.mark.parametrize(
    "form",
    [
        {"experts": "reference"},
        {"experts": "ordered"},
        {"experts": "ordered", "mlp_of_rows": "reference"},
        {"*": "reference", "experts": "ordered"},
    ],
    ids=str,
)
ACTIVATIONS = pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
EXPERTS, WIDTH, HIDDEN = 4, 6, 5


def weights(activation: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rows = 2 * HIDDEN if activation == "swiglu" else HIDDEN
    gate_up = torch.randn(EXPERTS, rows, WIDTH, dtype=dtype, requires_grad=True)
    return gate_up, torch.randn(EXPERTS, WIDTH, HIDDEN, dtype=dtype, requires_grad=True)


def fixed(chosen: list[list[int]]) -> Routing:
    """Return a routing with these experts and random weights."""
    experts = torch.tensor(chosen, dtype=torch.int64).reshape(len(chosen), -1)
    factors = torch.randn(experts.shape, dtype=torch.float64, requires_grad=True)
    return Routing(experts, factors, loads_of(experts, EXPERTS), torch.empty(len(chosen), EXPERTS), torch.zeros(()))


CASES = {
    "one token": [[2, 0]],
    "all to one": [[3]] * 9,
    "empty experts": [[0, 2], [2, 0], [2, 0]],
    "every expert": [[1, 3, 0, 2], [0, 1, 2, 3]],
    "mixed": [[0, 1], [3, 1], [2, 0], [1, 2], [0, 3], [3, 2], [1, 0]],
}


@FORMS
@ACTIVATIONS
@pytest.mark.parametrize("case", CASES)
def test_experts_and_gradients_equal_a_loop_over_tokens(
    form: dict[str, str], activation: ExpertActivation, case: str
) -> None:
    routing = fixed(CASES[case])
    gate_up, down = weights(activation)
    x = torch.randn(len(CASES[case]), WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = (x, routing.weights_TK, gate_up, down)
    with force_on_all_threads(form):
        y = experts_mlp(x, routing, gate_up, down, activation)
        slopes = torch.randn_like(y)
        grads = torch.autograd.grad(y, inputs, slopes)
    factors = [list(row) for row in routing.weights_TK]
    expected = brute.mixed(x, CASES[case], factors, gate_up, down, activation)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, slopes), rtol=0, atol=1e-10)
    for expert in set(range(EXPERTS)) - {e for row in CASES[case] for e in row}:
        assert not grads[2][expert].any()
        assert not grads[3][expert].any()


@FORMS
@ACTIVATIONS
def test_zero_tokens_give_gradients_of_zero(form: dict[str, str], activation: ExpertActivation) -> None:
    gate_up, down = weights(activation)
    logits = torch.randn(0, EXPERTS, dtype=torch.float64, requires_grad=True)
    x = torch.randn(0, WIDTH, dtype=torch.float64, requires_grad=True)
    with force_on_all_threads(form):
        y = experts_mlp(x, route(RouteInputs(logits, None, Router(2))), gate_up, down, activation)
        grads = torch.autograd.grad(y.sum(), (x, logits, gate_up, down))
    assert y.shape == (0, WIDTH)
    assert [g.shape for g in grads] == [x.shape, logits.shape, gate_up.shape, down.shape]
    assert not any(g.any() for g in grads)


@FORMS
@ACTIVATIONS
def test_gradients_through_the_router_are_the_slopes(form: dict[str, str], activation: ExpertActivation) -> None:
    gate_up, down = weights(activation)
    logits = torch.randn(5, EXPERTS, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)

    def y(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return experts_mlp(x, route(RouteInputs(logits, None, Router(2, normalise=True))), gate_up, down, activation)

    with force_on_all_threads(form):
        assert gradcheck(y, (x, logits, gate_up, down))


class _Written(TorchDispatchMode):
    """Counts the elements of all tensors that operations return."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else (out,)
        self.elements += sum(x.numel() for x in outputs if isinstance(x, Tensor))
        return out


def written(tokens: int) -> int:
    """Return the elements written by both passes of the router and the experts."""
    gate_up, down = weights("swiglu")
    x = torch.randn(tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(tokens, EXPERTS, dtype=torch.float64, requires_grad=True)
    with force(experts="ordered"), _Written() as count:
        experts_mlp(x, route(RouteInputs(logits, None, Router(2))), gate_up, down, "swiglu").sum().backward()
    return count.elements


def test_work_is_linear_in_tokens() -> None:
    assert written(4000) - written(2000) == 2 * (written(2000) - written(1000)) > 0
