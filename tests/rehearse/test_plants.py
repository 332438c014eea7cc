"""Faults planted into the training code are noticed by a budget, each by its own number."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtron.planning.activations import MARGIN
from hybridtron.rehearse.budget import exceeded
from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.one_slice, PATIENT]
SEEN = {
    "a host wait": "waits per micro-batch",
    "a copy": "other bytes per token",
    "a larger activation": "peak bytes",
    "an upcast": "other bytes per token",
    "a lost kernel": "swiglu runs by recomputed",
}


@pytest.fixture(scope="module")
def budgets() -> dict[str, Any]:
    return printed_by("plants", processor_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("plant", SEEN)
def test_planted_faults_exceed_the_budget(budgets: dict[str, Any], plant: str) -> None:
    lines = exceeded(budgets[plant], budgets["nothing"])
    assert any(line.startswith(SEEN[plant]) for line in lines), lines


@pytest.mark.slow
def test_equal_steps_have_equal_budgets(budgets: dict[str, Any]) -> None:
    assert exceeded(budgets["nothing"], budgets["nothing"]) == []


@pytest.mark.slow
def test_exposed_collectives_exceed_the_budget(budgets: dict[str, Any]) -> None:
    assert budgets["hidden"]["exposed bytes"] > 0
    assert [line.partition(":")[0] for line in exceeded(budgets["not hidden"], budgets["hidden"])] == ["exposed bytes"]


@pytest.mark.slow
def test_plans_without_a_term_miss_the_margin(budgets: dict[str, Any]) -> None:
    peak = budgets["wide"]["peak bytes"]
    whole, *without_one = budgets["planned"]
    assert abs(whole / peak - 1) < MARGIN
    assert all(1 - planned / peak > MARGIN for planned in without_one), without_one
