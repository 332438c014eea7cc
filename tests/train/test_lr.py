"""The learning rate's shapes, by numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from hybridtron.config.schema import OptimConfig, PhaseConfig, Schedule
from hybridtron.train.lr import learning_rate

PHASE = PhaseConfig(tokens="1000", seq_len=1, global_batch=1, lr=2.0)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.02), (50, 1.0), (100, 2.0), (550, 1.1), (1000, 0.2), (1200, 0.2)]
)
def test_cosine(tokens: int, expected: float) -> None:
    assert learning_rate(tokens, PHASE, OptimConfig(warmup="10%")) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(50, 1.0), (100, 2.0), (800, 2.0), (900, 1.0), (1000, 0.0)])
def test_wsd(tokens: int, expected: float) -> None:
    optim = OptimConfig(schedule=Schedule.wsd, warmup="100", decay="20%", final_lr=0.0)
    assert learning_rate(tokens, PHASE, optim) == pytest.approx(expected)


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0, PHASE, OptimConfig(warmup="0")) == 2.0
