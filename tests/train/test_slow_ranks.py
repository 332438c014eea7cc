"""Slow ranks are named within 20 steps, and quiet runs name none: the rule on simulated times, and a run on 4 ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridtron.train.slow_ranks import FEWEST, SECTIONS, WINDOW, RankTimes, SlowRule


def times(ranks: int, steps: int, vary: float, seed: int) -> Iterator[np.ndarray]:
    """Yield each step's times: ranks differ by 1%, steps vary by `vary`, and 2% of times are 1.5 to 4 times as long."""
    random = np.random.default_rng(seed)
    speed = 1 + random.normal(0, 0.01, ranks)
    for _ in range(steps):
        step = speed * np.exp(random.normal(0, vary, ranks)) * np.exp(random.normal(0, 0.02))
        yield np.where(random.random(ranks) < 0.02, step * random.uniform(1.5, 4, ranks), step)


@pytest.mark.parametrize("vary", [0.01, 0.05])
def test_a_rank_that_takes_a_fifth_longer_is_named_within_20_steps(vary: float) -> None:
    for seed in range(10):
        rule = SlowRule([range(8)])
        named: set[int] = set()
        for step in times(8, 20, vary, seed):
            step[5] *= 1.2
            named |= rule.add(step).keys()
        assert named == {5}, seed


@pytest.mark.parametrize("vary", [0.01, 0.05])
@pytest.mark.parametrize("ranks", [8, pytest.param(512, marks=pytest.mark.slow)])
def test_a_quiet_run_of_2000_steps_names_no_rank(ranks: int, vary: float) -> None:
    rule = SlowRule([range(ranks)])
    for step in times(ranks, 2000, vary, ranks):
        assert not rule.add(step)


def test_ranks_are_compared_with_their_peers_alone() -> None:
    """The second half, another pipeline stage, takes twice as long, which is no fault of its ranks."""
    rule = SlowRule([range(4), range(4, 8)])
    slow: dict[int, float] = {}
    for step in times(8, 20, 0.01, 0):
        step[4:] *= 2
        step[6] *= 1.3
        slow = rule.add(step)
    assert slow.keys() == {6}
    assert slow[6] == pytest.approx(0.3, abs=0.05)


def test_too_few_peers_name_nobody() -> None:
    rule = SlowRule([range(FEWEST - 1)])
    for step in times(FEWEST - 1, 30, 0.01, 0):
        step[0] *= 5
        assert not rule.add(step)


def rank_times(rank: int, ranks: int, hosts: str) -> RankTimes:
    """Make the times of one of several data-parallel ranks."""
    place: Any = SimpleNamespace(rank=0)
    control = SimpleNamespace(all_gather=lambda own: [[host, own[1]] for host in hosts])
    fake: Any = SimpleNamespace(
        rank=rank, is_first=rank == 0, tensor=place, context=place, pipeline=place, control=control
    )
    assert len(hosts) == ranks
    return RankTimes(fake)


def test_the_first_rank_warns_once_by_host(caplog: pytest.LogCaptureFixture) -> None:
    """All ranks' numbers are added, as the reduction adds them; rank 2 waits for data."""
    ranks = [rank_times(rank, 4, "aabb") for rank in range(4)]
    with caplog.at_level(logging.WARNING):
        for step in range(30):
            numbers = [each.numbers(asked=float(step)) for each in ranks]
            sums = [sum(of_slot) for of_slot in zip(*numbers, strict=True)]
            for rank, each in enumerate(ranks):
                each.take(sums)
                each.record(0.2 if rank == 2 else 0.01, 0.3)
    assert [record.message for record in caplog.records] == ["SLOW: b rank 2 is 61% slower than its peers in data"]
    slow = ranks[0].slow_metrics()
    assert slow is not None
    assert slow.keys() == {"b rank 2"}
    metrics = ranks[0].metrics()
    assert metrics is not None
    assert metrics["data_max"] == 0.2
    assert metrics["rest_median"] == pytest.approx(1 - 0.31)
    assert metrics.keys() == {f"{section}_{kind}" for section in SECTIONS for kind in ("median", "max")}
    assert WINDOW <= 20


def test_few_ranks_send_no_times() -> None:
    assert rank_times(0, 3, "abc").numbers(1.0) == []
    assert rank_times(0, 3, "abc").metrics() is None
