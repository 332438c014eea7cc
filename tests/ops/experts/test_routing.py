"""The router: against loops over single experts in float64, at ties, and its losses."""

import pytest
import torch
from torch.autograd import gradcheck

from hybridtron.ops.dispatch import force
from hybridtron.ops.experts import ChoiceInputs, RouteInputs, Router, balance_loss, expert_choice, route, z_loss
from tests.ops.experts import brute

FORMS = pytest.mark.parametrize("form", ["reference", "native"])
ROUTERS = [
    Router(1),
    Router(2, normalise=True),
    Router(4, "sigmoid", normalise=True, scale=2.5),
    Router(2, "sigmoid", groups=4, group_limit=2),
    Router(3, "softmax", groups=2, group_limit=1, scale=0.5),
    Router(8, "softmax", normalise=True),
]


@FORMS
@pytest.mark.parametrize("options", ROUTERS, ids=repr)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_route_equals_a_loop(form: str, options: Router, corrected: bool, tokens: int) -> None:
    logits = 2 * torch.randn(tokens, 8, dtype=torch.float64)
    correction = torch.randn(8, dtype=torch.float64) if corrected else None
    with force(expert_choice=form):
        routing = route(RouteInputs(logits, correction, options))
    chosen, weights = brute.routed(logits, correction, options)
    assert routing.experts_TK.tolist() == chosen
    expected = torch.tensor(weights, dtype=torch.float64).reshape(tokens, options.top_k)
    torch.testing.assert_close(routing.weights_TK, expected, rtol=0, atol=1e-12)
    assert routing.loads_E.tolist() == [sum(row.count(e) for row in chosen) for e in range(8)]
    assert routing.loads_E.dtype == routing.experts_TK.dtype == torch.int64
    shares = routing.scores_TE / routing.scores_TE.sum(1, keepdim=True)
    torch.testing.assert_close(routing.entropy, torch.special.entr(shares).sum())


@FORMS
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_equal_scores_choose_the_first_expert(form: str, scores: str) -> None:
    logits = torch.randint(0, 2, (200, 64), dtype=torch.float64)
    for options in (Router(6, scores), Router(6, scores, groups=8, group_limit=3)):
        with force(expert_choice=form):
            routing = route(RouteInputs(logits, None, options))
        assert routing.experts_TK.tolist() == brute.routed(logits, None, options)[0]


def test_compiled_choice_sorts_values_that_are_no_numbers_as_torch_does() -> None:
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0])
    scores = values[torch.randint(0, 5, (300, 8))]
    for options in (Router(4), Router(4, groups=4, group_limit=2)):
        chosen = []
        for form in ("reference", "native"):
            with force(expert_choice=form):
                chosen.append(expert_choice(ChoiceInputs(scores, None, options)))
        assert torch.equal(*chosen)


@pytest.mark.parametrize("options", ROUTERS, ids=repr)
def test_weights_and_scores_have_the_slopes_as_gradients(options: Router) -> None:
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    correction = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = route(RouteInputs(logits, correction, options))
        return routing.weights_TK, routing.scores_TE

    assert gradcheck(outputs, (logits,))
    assert torch.autograd.grad(outputs(logits)[0].sum(), correction, allow_unused=True) == (None,)


def test_narrow_logits_are_routed_in_fp32() -> None:
    logits = torch.randn(20, 8, dtype=torch.bfloat16)
    routing = route(RouteInputs(logits, None, ROUTERS[2]))
    wide = route(RouteInputs(logits.float(), None, ROUTERS[2]))
    assert routing.weights_TK.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(routing, wide, strict=True))


def test_z_loss_is_the_mean_square_of_the_log_of_the_sum() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    log2 = torch.tensor(2.0, dtype=torch.float64).log()
    torch.testing.assert_close(z_loss(logits), (log2**2 + (1 + log2) ** 2) / 2)
    assert z_loss(torch.zeros(0, 2)) == 0


def test_balance_loss_is_linear_in_the_mean_scores_and_gives_fractions_no_gradient() -> None:
    scores = torch.rand(7, 4, dtype=torch.float64, requires_grad=True)
    fractions = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64, requires_grad=True)
    loss = balance_loss(scores, fractions)
    by_scores, by_fractions = torch.autograd.grad(loss, (scores, fractions), allow_unused=True)
    torch.testing.assert_close(by_scores, (4 / 7 * fractions).detach().expand(7, 4))
    assert by_fractions is None
    even = balance_loss(torch.full((7, 4), 0.25, dtype=torch.float64), fractions)
    torch.testing.assert_close(even, torch.ones((), dtype=torch.float64))
    assert balance_loss(torch.zeros(0, 4), torch.zeros(4)) == 0


def test_balance_loss_of_each_sequence_is_that_of_the_sequence_alone() -> None:
    scores, fractions = torch.rand(3, 7, 4), torch.rand(3, 4)
    losses = balance_loss(scores, fractions)
    assert torch.equal(losses, torch.stack([balance_loss(s, f) for s, f in zip(scores, fractions, strict=True)]))
