"""The data that each step reads when windows are left out, compared with lists without these windows."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.train.skipped_data import SkippedData
from tests.conftest import small_config

PHASE = PhaseConfig(tokens="10", seq_len=1, global_batch=1, lr=1.0)
WINDOW = st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 9)).map(lambda w: (w[0], w[1], w[1] + w[2]))
WINDOWS = st.lists(WINDOW, max_size=5)


def left(windows: list[tuple[int, int, int]], phase: int) -> list[int]:
    """The steps of a phase's data, the windows taken out."""
    gone = {step for of, first, end in windows if of == phase for step in range(first, end)}
    return [step for step in range(100) if step not in gone]


@given(WINDOWS, st.integers(0, 1))
def test_steps_read_the_remaining_data(windows: list[tuple[int, int, int]], phase: int) -> None:
    skipped = SkippedData(windows)
    expected = left(windows, phase)
    assert [skipped.data_step(phase, step) for step in range(40)] == expected[:40]
    jumps = [step for step in range(1, 40) if expected[step] != expected[step - 1] + 1]
    assert [step for step in range(40) if skipped.jumps(phase, step)] == jumps


@given(WINDOWS, st.integers(0, 40), st.integers(0, 20))
def test_ranges_of_steps_read_the_remaining_data(windows: list[tuple[int, int, int]], first: int, count: int) -> None:
    skipped = SkippedData(windows)
    runs = skipped.runs(0, first, first + count)
    assert [step for run in runs for step in run] == left(windows, 0)[first : first + count]
    assert all(after.start > before.stop for before, after in pairwise(runs))


@given(WINDOWS)
def test_skipped_data_survives_a_checkpoint(windows: list[tuple[int, int, int]]) -> None:
    skipped = SkippedData(windows)
    assert SkippedData(list(window) for window in skipped.all).all == skipped.all


@given(WINDOWS, st.integers(0, 19), st.integers(1, 20))
def test_data_of_failed_steps_is_skipped(windows: list[tuple[int, int, int]], done: int, count: int) -> None:
    """Two phases of ten steps: nothing that the steps after `done` up to the failed one read is read again."""
    failed = min(done + count, 20)
    phases = resolve(Config(model=small_config(), phases=[PHASE, PHASE]))
    skipped = SkippedData(windows)
    after = skipped.and_failed(phases, done, failed)
    for resolved in phases:
        phase = resolved.index
        start = resolved.start_step
        read = [skipped.data_step(phase, step - start) for step in range(start, resolved.end_step)]
        again = [after.data_step(phase, step) for step in range(20)]
        before = min(max(done - start, 0), len(read))
        tried = read[before : max(failed - start, 0)]
        assert again[:before] == read[:before]
        assert not set(tried) & set(again)
        remaining = [step for step in left(windows, phase) if not (tried and tried[0] <= step <= tried[-1])]
        assert again == remaining[:20]
