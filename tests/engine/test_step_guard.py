"""The guard: which norms are refused, compared with numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hybridtron.engine.step_guard import WARMUP_STEPS, WINDOW, StepGuard


def used_to(norms: list[float], spike: float | None = 6.0) -> StepGuard:
    guard = StepGuard(spike)
    assert all(guard.accepts(norm, 1.0) for norm in norms)
    return guard


def test_norms_and_losses_that_are_not_finite_are_refused_from_the_first_step_on() -> None:
    guard = StepGuard(None)
    for norm, loss in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)):
        assert not guard.accepts(norm, loss)
        assert "is" in str(guard.why)
    assert guard.refused == 4
    assert guard.accepts(1.0, 1.0)
    assert (guard.refused, guard.why, list(guard.norms)) == (0, None, [1.0])


def test_limit_is_deviations_above_the_mean_of_the_logarithms() -> None:
    """Norms of 1 and e: the mean of the logarithms is 1/2, and so is their deviation."""
    guard = used_to([1.0, math.e] * (WARMUP_STEPS // 2), spike=3.0)
    assert guard.limit == pytest.approx(math.exp(2.0))
    assert not guard.accepts(math.exp(2.01), 1.0)
    assert "7.389" in str(guard.why)
    assert guard.accepts(math.exp(1.99), 1.0)


def test_limit_scales_with_the_norms() -> None:
    norms = [1.0 + 0.3 * math.sin(step) for step in range(WINDOW)]
    limit = used_to(norms).limit
    of_larger = used_to([1000 * norm for norm in norms]).limit
    assert limit is not None
    assert of_larger == pytest.approx(1000 * limit)


def test_finite_norms_are_accepted_before_enough_were_seen_and_without_a_limit() -> None:
    assert used_to([1.0] * (WARMUP_STEPS - 1)).accepts(1e30, 1.0)
    assert used_to([1.0] * WINDOW, spike=None).accepts(1e30, 1.0)


def test_steady_norms_may_rise_a_little() -> None:
    guard = used_to([1.0] * WINDOW)
    assert guard.accepts(4.4, 1.0)
    assert not guard.accepts(5.0, 1.0)


@pytest.mark.parametrize("rate", [-0.03, 0.01])
def test_drifting_norms_are_accepted(rate: float) -> None:
    """Norms that fall to a tenth in 77 steps, or rise to the tenfold in 230, with a scatter of their own."""
    used_to([math.exp(rate * step + 0.05 * math.sin(7 * step)) for step in range(600)])


def test_window_holds_the_latest_accepted_norms() -> None:
    guard = used_to([1.0] * WINDOW)
    assert not any(guard.accepts(100.0, 1.0) for _ in range(WINDOW))
    assert list(guard.norms) == [1.0] * WINDOW
    later = used_to([1.0] * WARMUP_STEPS + [1.5] * WINDOW)
    assert list(later.norms) == [1.5] * WINDOW


def test_norm_of_zero_is_accepted_and_not_counted() -> None:
    guard = used_to([1.0] * WARMUP_STEPS + [0.0])
    assert len(guard.norms) == WARMUP_STEPS
    assert guard.limit is not None


def test_limits_are_finite() -> None:
    assert math.isfinite(used_to([1e-30, 1e30] * WARMUP_STEPS, spike=1000.0).limit or math.nan)


def test_restarted_guard_has_the_limit_and_count_of_the_old() -> None:
    guard = used_to([1.0 + 0.01 * step for step in range(WARMUP_STEPS)])
    guard.accepts(math.nan, 1.0)
    other = StepGuard(6.0)
    other.restart(list(guard.norms), guard.refused)
    assert (other.limit, other.refused) == (guard.limit, 1)


def test_healthy_laptop_runs_refuse_no_step_and_spikes_are_refused() -> None:
    """Use norms of the laptop recipe, `run.seed=0` to 9 with `optim.spike=null`; a spike is ten times such a norm.

    The steep fall at the start widens the usual range until it has left the window.
    """
    runs = json.loads((Path(__file__).parent / "laptop_norms.json").read_text())
    assert len(runs) == 10
    for norms in runs.values():
        guard = used_to(norms[: WINDOW + WARMUP_STEPS])
        for step in range(WINDOW + WARMUP_STEPS, len(norms)):
            assert guard.limit is not None
            assert norms[step] < guard.limit < 10 * norms[step]
            assert guard.accepts(norms[step], 1.0)
