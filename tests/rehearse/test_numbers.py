"""Requests to stop and ranks' times ride with the gradient norm: a step waits and sends as often as without them."""

from __future__ import annotations

import pytest

from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.one_slice, PATIENT]


@pytest.mark.slow
def test_numbers_cost_no_wait_and_no_call() -> None:
    results = printed_by("numbers", processor_s=200)
    assert results["29"]["waits"] == results["0"]["waits"] == 1
    assert results["29"]["calls"] == results["0"]["calls"] > 0
