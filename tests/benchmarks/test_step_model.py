"""The page that compares modelled steps with measured ones: its numbers, and the model's error."""

from __future__ import annotations

import pytest

from benchmarks.step_model import PAGE, MeasuredStep, mean_error, page, read
from hybridtron.planning.rates import HOST_S, TRITON_S


def test_page_is_the_one_that_the_data_give() -> None:
    assert PAGE.read_text() == page()


def test_model_has_at_most_half_the_error_that_it_had_without_latencies() -> None:
    steps, _ = read()
    measured = [step.measured for step in steps]
    before = mean_error([step.before for step in steps], measured)
    assert len(steps) == 7
    assert mean_error([step.modelled for step in steps], measured) <= before / 2


def test_kernels_never_became_faster_by_more_than_the_rule_that_was_dropped() -> None:
    """Only the rule that a warp issues at most every second cycle was dropped, which stall cycles replace."""
    _, kernels = read()
    for kernel in [kernel for several in kernels.values() for kernel in several]:
        assert kernel["after_us"] >= 0.5 * kernel["before_us"]
        assert kernel["launches"] > 0


def test_mean_error_is_without_signs() -> None:
    assert mean_error([0.5, 1.2], [1.0, 1.0]) == pytest.approx((0.5 + 0.2) / 2)


@pytest.mark.parametrize(("after", "bound"), [(30.0, "device-bound"), (10.0, "host-bound")])
def test_longer_side_is_the_step(after: float, bound: str) -> None:
    step = MeasuredStep("a", 1, measured=40.0, before=20.0, after=after, launches=500, kernels=100)
    assert step.host == pytest.approx(1e3 * (500 * HOST_S + 100 * TRITON_S))
    assert step.modelled == max(after, step.host)
    assert step.bound == bound
