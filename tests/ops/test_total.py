"""What a row leaves of the state before it: with the state after zeros it is the op's own state, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.delta import DeltaInputs
from hybridtron.ops.dispatch import force
from hybridtron.ops.ssd import DecayInputs, decay_scan
from hybridtron.ops.total import (
    Factors,
    Matrices,
    Total,
    decay_total,
    delta_total,
    gla_total,
    scan_total,
    ssd_total,
    turned_total,
)
from hybridtron.ops.turns import AngleInputs, TurnInputs, angles, turn_pairs, turned
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

TOTALS: dict[str, Callable[[Any], Total]] = {
    "scan": scan_total,
    "ssd": ssd_total,
    "decay": decay_total,
    "gla": gla_total,
    "delta by channel": delta_total,
    "delta by head": delta_total,
}
OPS = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda each: each.name)
DOCUMENTS = pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS, 0 * TWO_DOCUMENTS], ids=["none", "two", "one"])


def total_of(recurrence: Recurrence, inputs: Any) -> Total:
    with force("reference"):
        return TOTALS[recurrence.name](inputs)


def after_zeros(recurrence: Recurrence, inputs: Any) -> Tensor:
    return run(recurrence.op, "reference", with_state(inputs, None))[1]


@OPS
@DOCUMENTS
def test_what_is_left_and_the_state_after_zeros_are_the_state(recurrence: Recurrence, documents: Tensor | None) -> None:
    inputs = recurrence.make()._replace(documents_BL=documents)
    before = getattr(inputs, state_of(inputs))
    _, expected = run(recurrence.op, "reference", inputs)
    found = total_of(recurrence, inputs).of(before) + after_zeros(recurrence, inputs)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    nothing = torch.zeros(())
    wanted = gradients(some_loss(nothing, expected), inputs)
    for name, grad in gradients(some_loss(nothing, found), inputs).items():
        assert_close(grad, wanted[name], rtol=1e-10, atol=1e-10, msg=lambda said, name=name: f"{name}: {said}")


@OPS
@pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["none", "two"])
def test_shares_of_a_row_are_joined(recurrence: Recurrence, documents: Tensor | None) -> None:
    """Each is read from zeros; borders in the first, the second, or none of them."""
    inputs = recurrence.make()._replace(documents_BL=documents)
    state = getattr(inputs, state_of(inputs))
    _, expected = run(recurrence.op, "reference", inputs)
    totals = []
    for tokens in (slice(0, 3), slice(3, 6), slice(6, 10), slice(10, 11)):
        share = cut(inputs, tokens, None)
        if documents is not None:
            state = state * continues(documents, tokens.start).view(-1, *[1] * (state.dim() - 1))
        totals.append(total_of(recurrence, share))
        state = totals[-1].of(state) + after_zeros(recurrence, share)
    assert_close(state, expected, rtol=1e-12, atol=1e-12)
    if documents is None:
        whole = totals[3].after(totals[2].after(totals[1].after(totals[0])))
        before = getattr(inputs, state_of(inputs))
        assert_close(whole.of(before), total_of(recurrence, inputs).of(before), rtol=1e-12, atol=1e-12)


def continues(documents_BL: Tensor, token: int) -> Tensor:
    """Whether what is before a token is of its document."""
    return (documents_BL[:, token] == documents_BL[:, max(token - 1, 0)]).double()


@OPS
def test_gradients_are_the_slopes(recurrence: Recurrence) -> None:
    inputs = recurrence.make(length=5)
    before = getattr(inputs, state_of(inputs))
    names = [name for name in inputs._fields if name.startswith(("dt_", "A_", "g_", "beta_", "k_"))]

    def left(before: Tensor, *tensors: Tensor) -> Tensor:
        return total_of(recurrence, inputs._replace(**dict(zip(names, tensors, strict=True)))).of(before)

    given = [before, *(getattr(inputs, name) for name in names)]
    assert torch.autograd.gradcheck(left, given, fast_mode=True)


@OPS
def test_nothing_of_an_infinite_state_passes_a_border(recurrence: Recurrence) -> None:
    inputs = recurrence.make()._replace(documents_BL=torch.stack((TWO_DOCUMENTS[0], 0 * TWO_DOCUMENTS[0])))
    left = total_of(recurrence, inputs).of(torch.full_like(getattr(inputs, state_of(inputs)), torch.inf))
    assert not left[0].any()
    assert not left[1].isfinite().all()
    one, two = (total_of(recurrence, inputs._replace(documents_BL=each)) for each in (0 * TWO_DOCUMENTS, TWO_DOCUMENTS))
    finite = torch.ones_like(left)
    for joined in (one.after(two), two.after(one), two.after(two)):
        assert not joined.of(finite).any()
    assert one.after(one).of(finite).any()


@OPS
def test_of_bf16_tokens_it_is_in_fp32(recurrence: Recurrence) -> None:
    inputs = recurrence.make(length=150, dtype=torch.bfloat16)
    before = getattr(inputs, state_of(inputs))
    left, expected = (total_of(recurrence, given).of(before.to(kind)) for given, kind in of_both_types(inputs))
    assert left.dtype == torch.float32
    assert_close(left.double(), expected, rtol=1e-5, atol=1e-6)


def of_both_types(inputs: Any) -> list[tuple[Any, torch.dtype]]:
    return [(inputs, torch.float32), (exact(inputs), torch.float64)]


def test_sums_of_a_long_row_keep_their_digits() -> None:
    """Rounding of sums in fp32 would be one of 2^-24 for each of 100,000 tokens, and shows as that of their total."""
    inputs = gla_inputs(1, 100_000, 1, 2, 1, dtype=torch.float32)
    slow = inputs._replace(g_BLHN=(inputs.g_BLHN * 1e-5).detach())
    expected = slow.g_BLHN.double().sum(1).exp()
    found = gla_total(slow)
    assert isinstance(found, Factors)
    assert_close(found.factor.squeeze(3).double(), expected, rtol=1e-7, atol=0)


def test_orthonormal_keys_that_are_written_once_are_forgotten_by_the_delta_rule() -> None:
    """By hand: a step of 1 takes out its key, of 2 mirrors it, and what no key leads to only decays."""
    k, g = torch.eye(3, dtype=torch.float64)[:2].view(1, 2, 1, 3), torch.full((1, 2, 1, 1), 0.5).double().log()
    v = torch.randn(1, 2, 1, 4, dtype=torch.float64)
    found = delta_total(DeltaInputs(v.new_zeros(1, 2, 1, 3), k, v, torch.tensor([[[1.0], [2.0]]]).double(), g))
    assert isinstance(found, Matrices)
    assert_close(found.matrix_BHNN[0, 0], torch.tensor([0.0, -0.25, 0.25]).double().diag())


@pytest.mark.parametrize("form", ["chunked", "native"])
def test_fast_forms_of_the_delta_rule_give_its_matrices(form: str) -> None:
    (recurrence,) = (each for each in RECURRENCES if each.name == "delta by channel")
    inputs = recurrence.make(length=150, dtype=torch.float32, **recurrence.wide)
    expected = delta_total(exact(inputs)).of(before := inputs.state_BHNP.double())
    with force(form):
        found = delta_total(inputs).of(before.float())
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm().clamp(min=1e-3)


def test_the_state_that_mamba_3_hands_on_is_turned() -> None:
    """Rows whose angles begin at 0 each: their states, at angle 0, are joined to the one of the whole row."""
    steps, rates, k, q = torch.rand(2, 12, 3), torch.randn(2, 12, 2), torch.randn(2, 12, 1, 6), torch.randn(2, 12, 1, 6)
    bias, v, before = torch.ones(3, 6), torch.randn(2, 12, 3, 4), torch.randn(2, 3, 4, 6)
    steps, rates, k, q, bias, v, before = (t.double() for t in (steps, rates, k, q, bias, v, before))

    def read(tokens: slice, before: Tensor | None) -> tuple[Tensor, Total]:
        turns = angles(AngleInputs(steps[:, tokens], rates[:, tokens]))
        keys, queries = turn_pairs(TurnInputs(k[:, tokens], q[:, tokens], bias, bias, turns))
        inputs = DecayInputs(queries, keys, v[:, tokens], -0.3 * steps[:, tokens], before)
        return turned(decay_scan(inputs)[1], -turns[:, -1].unsqueeze(2)), turned_total(inputs, turns)

    expected, whole = read(slice(0, 12), before)
    (one, first), (two, second) = (read(tokens, None) for tokens in (slice(0, 5), slice(5, 12)))
    assert_close(second.of(first.of(before) + one) + two, expected, rtol=1e-12, atol=1e-12)
    assert_close(second.after(first).of(before), whole.of(before), rtol=1e-12, atol=1e-12)
