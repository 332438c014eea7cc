"""Faults planted into the training code are noticed by a budget, each by its own number."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtron.planning.activations import MARGIN
from hybridtron.rehearse.budget import exceeded
from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = PATIENT
SEEN = {
    "a host wait": "waits per micro-batch",
    "a copy": "other bytes per token",
    "a larger activation": "peak bytes",
    "an upcast": "other bytes per token",
    "a lost kernel": "swiglu runs by recomputed",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return printed_by("plants", processor_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("plant", SEEN)
def test_a_plant_is_seen(found: dict[str, Any], plant: str) -> None:
    lines = exceeded(found[plant], found["nothing"])
    assert any(line.startswith(SEEN[plant]) for line in lines), lines


@pytest.mark.slow
def test_the_same_step_is_counted_alike(found: dict[str, Any]) -> None:
    assert exceeded(found["nothing"], found["nothing"]) == []


@pytest.mark.slow
def test_a_collective_that_is_not_hidden_is_seen(found: dict[str, Any]) -> None:
    assert found["hidden"]["exposed bytes"] > 0
    assert [line.partition(":")[0] for line in exceeded(found["not hidden"], found["hidden"])] == ["exposed bytes"]


@pytest.mark.slow
def test_a_term_that_the_plan_forgets_is_seen(found: dict[str, Any]) -> None:
    peak = found["wide"]["peak bytes"]
    whole, *without_one = found["planned"]
    assert abs(whole / peak - 1) < MARGIN
    assert all(1 - planned / peak > MARGIN for planned in without_one), without_one
