"""State transitions: applied to a state, with the state after zeros, they give the op's own state, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.delta import DeltaInputs
from hybridtron.ops.dispatch import force
from hybridtron.ops.transition import (
    StateTransition,
    decay_transition,
    delta_transition,
    gla_transition,
    scan_transition,
    ssd_transition,
)
from tests.ops.recurrences import (
    RECURRENCES,
    TWO_DOCUMENTS,
    Recurrence,
    cut,
    exact,
    gla_inputs,
    gradients,
    run,
    some_loss,
    state_of,
    with_state,
)

TRANSITIONS: dict[str, Callable[[Any], StateTransition]] = {
    "scan": scan_transition,
    "ssd": ssd_transition,
    "decay": decay_transition,
    "gla": gla_transition,
    "delta by channel": delta_transition,
    "delta by head": delta_transition,
}
OPS = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.name)
DOCUMENTS = pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS, 0 * TWO_DOCUMENTS], ids=["none", "two", "one"])


def carried_over(recurrence: Recurrence, inputs: Any, state: Tensor) -> Tensor:
    """Apply a row's transition to the state before it, and stop the state where a document begins, as callers do."""
    with force("reference"):
        left = TRANSITIONS[recurrence.name](inputs).apply(state)
    if inputs.documents_BL is None:
        return left
    is_one = (inputs.documents_BL == inputs.documents_BL[:, :1]).all(1)
    return left.masked_fill(~is_one.view(-1, *[1] * (left.dim() - 1)), 0)


def after_zeros(recurrence: Recurrence, inputs: Any) -> Tensor:
    return run(recurrence.op, "reference", with_state(inputs, None))[1]


@OPS
@DOCUMENTS
def test_transition_plus_state_after_zeros_equals_the_state(recurrence: Recurrence, documents: Tensor | None) -> None:
    inputs = recurrence.make()._replace(documents_BL=documents)
    before = getattr(inputs, state_of(inputs))
    _, expected = run(recurrence.op, "reference", inputs)
    joined = carried_over(recurrence, inputs, before) + after_zeros(recurrence, inputs)
    assert_close(joined, expected, rtol=1e-12, atol=1e-12)
    nothing = torch.zeros(())
    wanted = gradients(some_loss(nothing, expected), inputs)
    for name, grad in gradients(some_loss(nothing, joined), inputs).items():
        assert_close(grad, wanted[name], rtol=1e-10, atol=1e-10, msg=lambda said, name=name: f"{name}: {said}")


@OPS
@pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["none", "two"])
def test_transitions_join_shards_of_a_row(recurrence: Recurrence, documents: Tensor | None) -> None:
    """Scan each shard from zeros, with boundaries in the first, the second, or neither of them."""
    inputs = recurrence.make()._replace(documents_BL=documents)
    state = getattr(inputs, state_of(inputs))
    _, expected = run(recurrence.op, "reference", inputs)
    for tokens in (slice(0, 3), slice(3, 6), slice(6, 10), slice(10, 11)):
        shard = cut(inputs, tokens, None)
        if documents is not None:
            state = state * continues(documents, tokens.start).view(-1, *[1] * (state.dim() - 1))
        state = carried_over(recurrence, shard, state) + after_zeros(recurrence, shard)
    assert_close(state, expected, rtol=1e-12, atol=1e-12)


def continues(documents_BL: Tensor, token: int) -> Tensor:
    """Return 1 where the token before a token is of the same document, else 0."""
    return (documents_BL[:, token] == documents_BL[:, max(token - 1, 0)]).double()


@OPS
def test_gradients_are_the_slopes(recurrence: Recurrence) -> None:
    inputs = recurrence.make(length=5)
    before = getattr(inputs, state_of(inputs))
    names = [name for name in inputs._fields if name.startswith(("dt_", "A_", "g_", "beta_", "k_"))]

    def left(before: Tensor, *tensors: Tensor) -> Tensor:
        return carried_over(recurrence, inputs._replace(**dict(zip(names, tensors, strict=True))), before)

    arguments = [before, *(getattr(inputs, name) for name in names)]
    assert torch.autograd.gradcheck(left, arguments, fast_mode=True)


@OPS
def test_transition_of_bf16_tokens_is_computed_in_fp32(recurrence: Recurrence) -> None:
    inputs = recurrence.make(length=150, dtype=torch.bfloat16)
    before = getattr(inputs, state_of(inputs))
    left = carried_over(recurrence, inputs, before.to(torch.float32))
    expected = carried_over(recurrence, exact(inputs), before.to(torch.float64))
    assert left.dtype == torch.float32
    assert_close(left.double(), expected, rtol=1e-5, atol=1e-6)


def test_decays_of_a_long_row_keep_their_digits() -> None:
    """Rounding of sums in fp32 would be one of 2^-24 for each of 100,000 tokens, and shows as that of their total."""
    inputs = gla_inputs(1, 100_000, 1, 2, 1, dtype=torch.float32)
    slow = inputs._replace(g_BLHN=(inputs.g_BLHN * 1e-5).detach())
    expected = slow.g_BLHN.double().sum(1).exp()
    factors = gla_transition(slow).values
    assert_close(factors.squeeze(3).double(), expected, rtol=1e-7, atol=0)


def test_delta_rule_transition_of_orthonormal_keys_equals_hand_computed_values() -> None:
    """Compare by hand: a step of 1 erases the part along its key, a step of 2 negates it, and the rest only decays."""
    k = torch.eye(3, dtype=torch.float64)[:2].view(1, 2, 1, 3)
    g = torch.full((1, 2, 1, 1), 0.5).double().log()
    v = torch.randn(1, 2, 1, 4, dtype=torch.float64)
    transition = delta_transition(
        DeltaInputs(v.new_zeros(1, 2, 1, 3), k, v, torch.tensor([[[1.0], [2.0]]]).double(), g)
    )
    assert transition.is_matrix
    assert_close(transition.values[0, 0], torch.tensor([0.0, -0.25, 0.25]).double().diag())


@pytest.mark.parametrize("form", ["chunked", "native"])
def test_fast_forms_of_the_delta_rule_equal_the_reference_transition(form: str) -> None:
    (recurrence,) = (candidate for candidate in RECURRENCES if candidate.name == "delta by channel")
    inputs = recurrence.make(length=150, dtype=torch.float32, **recurrence.wide)
    expected = delta_transition(exact(inputs)).apply(before := inputs.state_BHNP.double())
    with force(form):
        after = delta_transition(inputs).apply(before.float())
    assert (after.double() - expected).norm() <= 1e-5 * expected.norm().clamp(min=1e-3)
