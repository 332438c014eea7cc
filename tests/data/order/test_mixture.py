"""Counts of rows by source against their shares, and the rows' numbers against a walk."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtron.data.order.mixture import Mixture, cumulated

SLIMPAJAMA = [52.2, 26.7, 5.2, 4.2, 4.6, 3.8, 3.3]
GOLDEN = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0]


def walk(mixture: Mixture, rows: int) -> np.ndarray:
    """The sources of the first rows, their numbers checked: 0, 1, 2, ... of each source."""
    sources = []
    seen: dict[int, int] = {}
    for row in range(rows):
        source, number = mixture.locate(row)
        assert number == seen.get(source, 0)
        seen[source] = number + 1
        sources.append(source)
    return np.array(sources)


def rows(mixture: Mixture, source: int, first: int) -> int:
    """Count the source's rows before `first`: the number of its next row."""
    while (located := mixture.locate(first))[0] != source:
        first += 1
    return located[1]


def errors(sources: np.ndarray, weights: list[float]) -> np.ndarray:
    """Return the deviation of each source's count from its share after each row, (rows, sources)."""
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return counts - np.arange(1, len(sources) + 1)[:, None] * np.array(weights) / np.sum(weights)


def test_mixture_order_equals_the_golden_order():
    mixture = Mixture([3, 1], 8, seed=5)
    assert [mixture.locate(row)[0] for row in range(24)] == GOLDEN


def test_many_steps_of_slimpajama_are_within_one_row():
    mixture = Mixture(SLIMPAJAMA, 512, seed=1)
    shares = np.array(SLIMPAJAMA) / np.sum(SLIMPAJAMA)
    for steps in (1, 2, 10, 333, 1000, 10**6, 10**9):
        counts = np.array([rows(mixture, source, 512 * steps) for source in range(7)])
        assert counts.sum() == steps * 512
        assert np.abs(counts - shares * steps * 512).max() < 1
    assert [rows(mixture, source, 512 * 1000) for source in range(7)] == [
        512 * round(10 * weight) for weight in SLIMPAJAMA
    ]
    boundaries = errors(walk(mixture, 512 * 60), SLIMPAJAMA)[511::512]
    assert np.abs(boundaries).max() < 1


def test_small_steps_stay_near_their_shares_between_blocks():
    mixture = Mixture(SLIMPAJAMA, 4, seed=1)  # a block is 64 rows
    deviations = np.abs(errors(walk(mixture, 64 * 40), SLIMPAJAMA))
    assert deviations[63::64].max() < 1
    assert deviations[3::4].max() < 2


@pytest.mark.slow
def test_sources_with_tiny_weights_get_their_share():
    weights = [0.7, 2e-6, 0.3, 4e-6]
    shares = np.array(weights) / np.sum(weights)
    mixture = Mixture(weights, 512, seed=1)
    sources = walk(mixture, 512 * 1954)
    for steps in (1, 1000, 1953, 1954):
        counts = np.bincount(sources[: 512 * steps], minlength=4)
        assert counts.sum() == steps * 512
        assert np.abs(counts - shares * steps * 512).max() < 2
    # 1954 x 512 rows, 1.0004e6, are a block
    assert counts[1] in (2, 3)
    assert counts[3] in (4, 5)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 99))
def test_counts_of_random_mixtures_stay_near_their_shares(weights: list[float], rows_per_step: int, seed: int):
    mixture = Mixture(weights, rows_per_step, seed)
    steps = 600 // rows_per_step
    sources = walk(mixture, steps * rows_per_step)
    deviations = np.abs(errors(sources, weights))[rows_per_step - 1 :: rows_per_step]
    assert deviations.max(initial=0) < 1.5 + max(weights) / sum(weights) * len(weights) / 2
    for step in (0, 1, steps // 2, steps):
        for source in range(len(weights)):
            assert rows(mixture, source, step * rows_per_step) == (sources[: step * rows_per_step] == source).sum()


def test_each_lane_reads_every_source():
    sources = walk(Mixture([1, 1], 8, seed=3), 8 * 400).reshape(400, 8)
    assert (np.abs(sources.mean(axis=0) - 0.5) < 0.1).all()
    assert (sources.sum(axis=1) == 4).all()


def test_a_row_does_not_depend_on_earlier_calls():
    located = [Mixture(SLIMPAJAMA, 6, seed=1).locate(row) for row in range(0, 2000, 7)]
    mixture = Mixture(SLIMPAJAMA, 6, seed=1)
    asked = list(range(0, 2000, 7))
    random.Random(0).shuffle(asked)
    assert all(mixture.locate(row) == located[row // 7] for row in asked)


def test_far_rows_and_seeds():
    mixture = Mixture(SLIMPAJAMA, 512, seed=1)
    first = 10**9 * 512
    located = [mixture.locate(first + row) for row in range(512)]
    for source in range(7):
        expected = list(range(rows(mixture, source, first), rows(mixture, source, first + 512)))
        assert [number for s, number in located if s == source] == expected
    other = Mixture(SLIMPAJAMA, 512, seed=2)
    assert [s for s, _ in located] != [other.locate(first + row)[0] for row in range(512)]


def test_a_single_source_gets_every_row():
    mixture = Mixture([0.3], 8, seed=1)
    assert mixture.locate(10**15) == (0, 10**15)


def test_whole_shares_are_reached_exactly():
    """A tenth is no multiple of 2**-60, and ten of them are still one."""
    mixture = Mixture([0.1] * 10, 10, seed=1)
    for steps in (2, 10, 1000, 10**6):
        assert [rows(mixture, source, 10 * steps) for source in range(10)] == [steps] * 10


def test_cumulated_is_exact():
    assert cumulated([1, 1, 2]) == [0, 2**58, 2**59, 2**60]
    assert cumulated(SLIMPAJAMA)[-1] == cumulated([0.1] * 10)[-1] == 2**60


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weights_must_be_positive(weight: float):
    with pytest.raises(ValueError, match=r"weights\[1\] is "):
        Mixture([1, weight], 8, seed=1)


def test_weights_must_not_be_out_of_reach():
    with pytest.raises(ValueError, match=r"weights\[2\] = 1e-09 is 5.0e-10 of all weights"):
        Mixture([1, 1, 1e-9], 8, seed=1)
    with pytest.raises(ValueError, match="at least one source"):
        Mixture([], 8, seed=1)
