"""The learning rate's pieces, by numbers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridtron.config.choices import DecaySchedule, LrPiece, Moments
from hybridtron.config.phase_schema import PhaseConfig, PhaseOptimConfig
from hybridtron.config.resolve import ResolvedPhase, resolve
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.train.lr import learning_rate, weight_decay
from tests.conftest import small_config

PHASE = PhaseConfig(tokens="1000", seq_len=1, global_batch=1, lr=2.0)


def configured(optim: OptimConfig, *phases: PhaseConfig) -> tuple[ResolvedPhase, ...]:
    return resolve(Config(model=small_config(), optim=optim, phases=list(phases)))


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.02), (50, 1.0), (100, 2.0), (550, 1.1), (1000, 0.2), (1200, 0.2)]
)
def test_cosine_decays_to_its_final_rate(tokens: int, expected: float) -> None:
    assert learning_rate(configured(OptimConfig(warmup="10%"), PHASE), 0, tokens) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(50, 1.0), (100, 2.0), (800, 2.0), (900, 1.0), (1000, 0.0)])
def test_wsd_holds_before_it_decays(tokens: int, expected: float) -> None:
    optim = OptimConfig(schedule="wsd", warmup="100", decay="20%", final_lr=0.0)
    assert learning_rate(configured(optim, PHASE), 0, tokens) == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["0", "0%"])
def test_wsd_without_a_decay_holds_to_the_end(decay: str) -> None:
    """The last of the steps with 300 tokens ends after the schedule's 1000."""
    phases = configured(OptimConfig(schedule="wsd", warmup="100", decay=decay), PHASE, replace(PHASE, lr=3.0))
    rates = [learning_rate(phases, 0, tokens) for tokens in (900, 1000, 1001, 1200)]
    assert rates == [2.0] * 4
    assert learning_rate(phases, 1, 50) == 2.5  # warms up from the last rate of the first phase
    assert learning_rate(phases, 1, 1200) == 3.0


@pytest.mark.parametrize(("tokens", "expected"), [(50, 1.0), (100, 2.0), (550, 1.1), (1000, 0.2)])
def test_linear_decays_to_its_final_rate(tokens: int, expected: float) -> None:
    phases = configured(OptimConfig(schedule="linear", warmup="100"), PHASE)
    assert learning_rate(phases, 0, tokens) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(50, 1.0), (100, 2.0), (1000, 2.0)])
def test_constant_stays_at_its_peak(tokens: int, expected: float) -> None:
    phases = configured(OptimConfig(schedule="constant", warmup="100"), PHASE)
    assert learning_rate(phases, 0, tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.0), (200, 0.0), (201, 0.02), (250, 1.0), (300, 2.0), (650, 1.1), (1000, 0.2)]
)
def test_hold_precedes_the_warm_up(tokens: int, expected: float) -> None:
    """The schedule covers the rest: half a cosine from 300 to 1000."""
    optim = OptimConfig(hold="20%", warmup="100")
    assert learning_rate(configured(optim, PHASE), 0, tokens) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(200, 0.0), (600, 1.0), (1000, 2.0)])
def test_later_phases_can_hold_at_zero(tokens: int, expected: float) -> None:
    held = replace(PHASE, optim=PhaseOptimConfig(hold="200", warmup="800"))
    phases = configured(OptimConfig(schedule="constant", warmup="0"), PHASE, held)
    assert learning_rate(phases, 1, tokens) == pytest.approx(expected)


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(configured(OptimConfig(warmup="0"), PHASE), 0, 0) == 2.0


@pytest.mark.parametrize(
    ("index", "tokens", "expected"), [(0, 200, 2.0), (0, 1000, 1.1 + 0.9 * 0.173648), (1, 100, 1.1), (1, 1000, 0.2)]
)
def test_phases_that_carry_on_continue_one_schedule(index: int, tokens: int, expected: float) -> None:
    """200 tokens of warm-up, then a cosine over 1800; the first phase ends at (1000 - 200) / 1800 of it."""
    rest = replace(PHASE, lr=None, lr_piece=LrPiece.carry_on)
    phases = configured(OptimConfig(warmup="10%"), PHASE, rest)
    assert learning_rate(phases, index, tokens) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.2), (50, 0.6), (100, 1.0), (1000, 0.1)])
def test_a_new_schedule_warms_up_from_the_last_rate(tokens: int, expected: float) -> None:
    phases = configured(OptimConfig(warmup="10%"), PHASE, replace(PHASE, lr=1.0))
    assert learning_rate(phases, 1, tokens) == pytest.approx(expected)


def test_schedules_without_moments_warm_up_from_zero() -> None:
    phases = configured(OptimConfig(warmup="10%"), PHASE, replace(PHASE, lr=1.0, moments=Moments.reset))
    assert learning_rate(phases, 1, 50) == pytest.approx(0.5)


def test_schedules_with_another_optimizer_warm_up_from_zero() -> None:
    turned = replace(PHASE, lr=1.0, optim=PhaseOptimConfig(name="muon"))
    phases = configured(OptimConfig(warmup="10%"), PHASE, turned, turned, replace(PHASE, lr=1.0))
    rates = [learning_rate(phases, index, 50) for index in (1, 2, 3)]
    assert rates == pytest.approx([0.5, 0.55, 0.5])


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.11), ("wsd", 0.11), ("linear", 0.11)])
def test_a_decay_phase_ends_at_its_rate(schedule: str, middle: float) -> None:
    last = replace(PHASE, lr=None, lr_piece=LrPiece.decay, lr_to=0.02, optim=PhaseOptimConfig(schedule=schedule))
    phases = configured(OptimConfig(warmup="10%"), PHASE, last)
    rates = [learning_rate(phases, 1, tokens) for tokens in (0, 500, 1000)]
    assert rates == pytest.approx([0.2, middle, 0.02])


@pytest.mark.parametrize(
    ("index", "tokens", "expected"),
    [(0, 50, 0.05), (0, 100, 0.1), (0, 1000, 0.01), (1, 100, 0.4), (1, 1000, 0.04), (2, 1000, 0.01)],
)
def test_weight_decay_can_follow_the_learning_rate(index: int, tokens: int, expected: float) -> None:
    """Each phase has its own peaks, here 2 and 0.1, then 1 and 0.4; the last one ends the course of the second."""
    with_own_decay = replace(PHASE, lr=1.0, optim=PhaseOptimConfig(weight_decay=0.4))
    last = replace(PHASE, lr=None, lr_piece=LrPiece.decay, lr_to=0.1)
    optim = OptimConfig(warmup="10%", weight_decay_schedule=DecaySchedule.lr)
    phases = configured(optim, PHASE, with_own_decay, last)
    assert weight_decay(phases, index, learning_rate(phases, index, tokens)) == pytest.approx(expected)


def test_constant_weight_decay_ignores_the_rate() -> None:
    constant = PhaseOptimConfig(weight_decay_schedule=DecaySchedule.constant)
    phases = configured(OptimConfig(weight_decay_schedule=DecaySchedule.lr), PHASE, replace(PHASE, optim=constant))
    assert [weight_decay(phases, 1, rate) for rate in (0.0, 1.0, 2.0)] == [0.1] * 3
