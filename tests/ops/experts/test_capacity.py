"""Choices beyond a capacity: counted as in a loop over each row, and moved through slots by every form alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.experts import (
    ExpertOrder,
    FromExpertsInputs,
    ToExpertsInputs,
    from_experts,
    row_ranks,
    slot_order,
    to_experts,
)

ROWS = 3
LENGTH = 12
EXPERTS = 5
TOP_K = 2
CHANNELS = 7
FORMS = pytest.mark.parametrize("form", ["gathered", "native"])


def choices(only: int | None = None) -> Tensor:
    """Return different experts for each token; with `only`, all first choices fall on this expert."""
    scores = torch.rand(LENGTH * ROWS, EXPERTS)
    if only is not None:
        scores[:, only] = 2.0
    return scores.argsort(1, descending=True)[:, :TOP_K].contiguous()


def by_loop(experts_TK: Tensor) -> list[list[int]]:
    """Count, for each choice, the earlier tokens of its row that chose the same expert."""
    table = experts_TK.tolist()
    return [[sum(e in table[s] for s in range(t % ROWS, t, ROWS)) for e in table[t]] for t in range(len(table))]


@pytest.mark.parametrize("form", ["reference", "native"])
@pytest.mark.parametrize("only", [None, 0, EXPERTS - 1])
def test_ranks_are_counted_within_each_row(form: str, only: int | None) -> None:
    experts_TK = choices(only)
    with force(expert_order=form):
        ranks = row_ranks(experts_TK, ROWS, EXPERTS)
    assert ranks.ranks_TK.tolist() == by_loop(experts_TK)
    loads = [[sum(e in c for c in experts_TK[row::ROWS].tolist()) for e in range(EXPERTS)] for row in range(ROWS)]
    assert ranks.loads_BE.tolist() == loads


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 2)])
def test_rows_of_one_token_have_the_rank_0(rows: int, tokens: int) -> None:
    ranks = row_ranks(torch.zeros(tokens, 1, dtype=torch.int64), rows, EXPERTS)
    assert (ranks.ranks_TK == 0).all()


def in_slots(most: int, only: int | None = None) -> tuple[ExpertOrder, Tensor]:
    experts_TK = choices(only)
    ranks_TK = row_ranks(experts_TK, ROWS, EXPERTS).ranks_TK
    kept_TK = ranks_TK < most
    return slot_order(experts_TK, ranks_TK, kept_TK, (ROWS, EXPERTS, most)), kept_TK


@pytest.mark.parametrize("most", [1, 3, LENGTH])
def test_every_kept_choice_has_a_slot_of_its_own(most: int) -> None:
    order, kept_TK = in_slots(most)
    count = EXPERTS * ROWS * most
    places = order.place_TK[kept_TK].tolist()
    assert len(set(places)) == len(places)
    assert (order.place_TK[~kept_TK] == count).all()
    for place, source in enumerate(order.source_N[:-1].tolist()):
        assert source == LENGTH * ROWS * TOP_K or order.place_TK.flatten()[source] == place
    assert order.ends_E.tolist() == [(e + 1) * ROWS * most for e in range(EXPERTS)]


def moved(form: str, dtype: torch.dtype, most: int, only: int | None) -> list[Tensor]:
    """Return rows in slots, sums of twice these rows, and gradients of tokens and weights."""
    torch.manual_seed(1)
    order, kept_TK = in_slots(most, only)
    x_TD = torch.randn(LENGTH * ROWS, CHANNELS).to(dtype).requires_grad_()
    weights_TK = torch.rand(LENGTH * ROWS, TOP_K, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    with force(form):
        rows_ND = to_experts(ToExpertsInputs(x_TD, order))
        doubled_ND = torch.cat([2 * rows_ND[:-1], rows_ND.new_zeros(1, CHANNELS)])
        y_TD = from_experts(FromExpertsInputs(doubled_ND, weights_TK * kept_TK, order))
        grads = torch.autograd.grad(y_TD.square().sum(), (x_TD, weights_TK))
    expected_TD = 2 * x_TD * (weights_TK * kept_TK).sum(1, keepdim=True)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(y_TD, expected_TD.to(dtype), rtol=close, atol=close)
    return [rows_ND[:-1], y_TD, *grads]


@FORMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("most", "only"), [(2, None), (3, 0), (LENGTH, None)])
def test_forms_move_the_same_rows(form: str, dtype: torch.dtype, most: int, only: int | None) -> None:
    expected = moved("reference", dtype, most, only)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(moved(form, dtype, most, only), expected, rtol=close, atol=close)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("most", "only"), [(2, None), (3, 0)])
def test_triton_kernels_move_the_same_rows(most: int, only: int | None) -> None:
    expected = moved("reference", torch.float32, most, only)
    torch.testing.assert_close(moved("triton", torch.float32, most, only), expected, rtol=1e-5, atol=1e-5)


def test_gradients_through_slots_are_the_slopes() -> None:
    order, kept_TK = in_slots(2)
    x_TD = torch.randn(LENGTH * ROWS, 2, dtype=torch.float64, requires_grad=True)

    def through(x_TD: Tensor) -> Tensor:
        rows_ND = to_experts(ToExpertsInputs(x_TD, order))
        rows_ND = torch.cat([rows_ND[:-1].square(), rows_ND.new_zeros(1, 2)])
        return from_experts(FromExpertsInputs(rows_ND, 0.3 * kept_TK.double(), order))

    for form in ("gathered", "native"):
        with force(form):
            assert torch.autograd.gradcheck(through, (x_TD,))
