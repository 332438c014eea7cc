"""A batch that grows, compared with numbers worked out by hand."""

from __future__ import annotations

import pytest

from hybridtron.config.batch_ramp import BatchRamp
from hybridtron.config.phase_schema import PhaseConfig, RampConfig

# 600 tokens shared by batches of 2 and 4 rows of 10: 300 take 15 steps of 20 tokens, and 8 (7.5) of 40
PHASE = PhaseConfig(tokens="2000", seq_len=10, global_batch=6, ramp=RampConfig(start=2, step=2, tokens="600"))


def test_each_size_takes_an_equal_share_of_the_tokens() -> None:
    batch_ramp = BatchRamp.of(PHASE)
    assert batch_ramp == BatchRamp(((15, 2), (8, 4)), 6)
    assert [batch_ramp.rows(step) for step in (0, 14, 15, 22, 23, 1000)] == [2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("step", range(40))
def test_rows_before_a_step_are_summed_over_earlier_steps(step: int) -> None:
    batch_ramp = BatchRamp.of(PHASE)
    assert batch_ramp.rows_before(step) == sum(batch_ramp.rows(earlier) for earlier in range(step))


@pytest.mark.parametrize("rows", range(1, 120, 7))
def test_a_number_of_rows_takes_the_fewest_steps(rows: int) -> None:
    batch_ramp = BatchRamp.of(PHASE)
    steps = batch_ramp.steps_for(rows)
    assert batch_ramp.rows_before(steps - 1) < rows <= batch_ramp.rows_before(steps)


def test_steps_without_a_ramp_are_alike() -> None:
    batch_ramp = BatchRamp.of(PhaseConfig(tokens="2000", seq_len=10, global_batch=6))
    assert (batch_ramp.rows(0), batch_ramp.rows_before(5), batch_ramp.steps_for(13)) == (6, 30, 3)
