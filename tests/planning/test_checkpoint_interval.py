"""The interval between checkpoints, against a search over simulated losses."""

from __future__ import annotations

import math

import pytest

from hybridtron.planning.checkpoint_interval import best_interval, lost_fraction, seconds_between_failures


def expected_time(interval_s: float, save_s: float, start_s: float, failure_s: float) -> float:
    """Return Daly's expected time of a run for each second of training, for failures at exponential intervals."""
    segment = (math.exp((interval_s + save_s) / failure_s) - 1) * failure_s * math.exp(start_s / failure_s)
    return segment / interval_s


@pytest.mark.parametrize(("save_s", "failure_s"), [(1.0, 86400.0), (60.0, 3600.0), (300.0, 3600.0), (900.0, 1800.0)])
def test_no_other_interval_takes_less_time(save_s: float, failure_s: float) -> None:
    start_s = 120.0
    searched = [failure_s * 10 ** (exponent / 200) for exponent in range(-1000, 200)]
    least = min(expected_time(each, save_s, start_s, failure_s) for each in searched)
    chosen = best_interval(save_s, failure_s)
    assert expected_time(chosen, save_s, start_s, failure_s) <= least * 1.001
    assert expected_time(chosen / 3, save_s, start_s, failure_s) > least * 1.001


def test_the_lost_fraction_is_near_the_expected_time_if_failures_are_rare() -> None:
    chosen = best_interval(10.0, 86400.0)
    exact = expected_time(chosen, 10.0, 120.0, 86400.0)
    assert 1 - 1 / exact == pytest.approx(lost_fraction(chosen, 10.0, 120.0, 86400.0), rel=0.03)


def test_saves_longer_than_failures_allow_wait_for_a_failure() -> None:
    assert best_interval(100.0, 40.0) == 40.0


def test_failures_come_as_often_as_devices_are_many() -> None:
    assert seconds_between_failures(16384) == pytest.approx(54 * 86400 / 419)
    assert seconds_between_failures(8) == pytest.approx(seconds_between_failures(16) * 2)
